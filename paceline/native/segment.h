// The memory that the ranks of a group share, and how they wait for each other in it.
//
// Every collective is a row of numbered steps, the same on all ranks. Publishing step s says: what I write in step s is
// written, and what others wrote before step s - 1 I have read. So data of step s lies in slot s % slots until all have
// published s + 2, and there is one word per rank to wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace paceline {

using Clock = std::chrono::steady_clock;

constexpr uint32_t slot_count = 4;
constexpr uint32_t descriptor_count = 8;
constexpr size_t slot_bytes = 1 << 20;
constexpr size_t ring_bytes = 1 << 18;
constexpr size_t line = 64;  // of the cache

enum class Kind : uint8_t {
  barrier, all_reduce, broadcast, reduce, all_gather, reduce_scatter, gather, scatter, all_to_all, all_to_all_uneven,
  allocate, send, receive
};

const char* name_of(Kind kind);

// What a rank believes the operation to be; the ranks compare.
struct Descriptor {
  Kind kind = Kind::barrier;
  Dtype dtype = Dtype::u8;
  Reduce reduce = Reduce::none;
  int32_t root = -1;
  uint64_t count = 0;
  uint64_t region = 0;  // where the buffer lies, if in a region of ours
  uint64_t offset = 0;
  uint32_t step = 0;  // its first
  uint64_t number = 0;

  bool matches(const Descriptor& other) const;
  std::string text() const;
};

struct alignas(line) Control {
  std::atomic<uint32_t> step{0};  // the last one published
  std::atomic<uint32_t> step_sleepers{0};
  std::atomic<int32_t> core{0};  // where it ran when it published that
  alignas(line) std::atomic<uint32_t> bell{0};  // rung when a ring to or from this rank has changed
  std::atomic<uint32_t> bell_sleepers{0};
  alignas(line) std::atomic<uint32_t> left{0};
  std::atomic<int32_t> pid{0};
  alignas(line) Descriptor descriptors[descriptor_count];
};

struct alignas(line) Header {
  std::atomic<uint32_t> broken{0};  // 1 while the reason is being written, then 2
  char reason[1020];
  alignas(line) std::atomic<uint32_t> meetings{0};  // grows when the last rank has published a step
  std::atomic<uint32_t> meeting_sleepers{0};
};

// A stream of bytes from one rank to another.
struct Ring {
  alignas(line) std::atomic<uint64_t> written{0};
  alignas(line) std::atomic<uint64_t> read{0};
  alignas(line) char bytes[ring_bytes];
};

// Thrown by whatever a rank cannot finish; the text names ranks, operation and group.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A shared mapping of a part of a file.
struct Mapping {
  Mapping(int descriptor, uint64_t offset, size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  const size_t bytes;
  char* data = nullptr;
};

struct File {
  explicit File(int descriptor) : descriptor(descriptor) {}
  virtual ~File();
  File(const File&) = delete;
  // Tests give all ranks of a process the same mapping, so that sanitizers see them share it.
  virtual std::shared_ptr<Mapping> map(uint64_t offset, size_t bytes);
  const int descriptor;
};

struct Member {
  int rank;
  int size;
  int cores;  // that the ranks share; the same on all, since the way to wait depends on it
  double timeout;
  std::string name;
  std::vector<int> numbers;  // what the ranks are called in messages, if not as here
};

class Segment {
 public:
  // `file` is the group's; `life` has one descriptor per rank that becomes readable when its process ends.
  Segment(std::shared_ptr<File> file, Member member, std::vector<int> life);
  ~Segment();

  static size_t bytes_for(int size);

  Control& control(int rank) { return controls_[rank]; }
  Descriptor& descriptor(int rank, uint32_t step) { return controls_[rank].descriptors[step % descriptor_count]; }
  char* slot(int rank, uint32_t step, bool result = false) {
    return slots_ + ((size_t(rank) * 2 + result) * slot_count + step % slot_count) * slot_bytes;
  }
  Ring& ring(int from, int to) { return rings_[size_t(from) * size_t(member.size) + size_t(to)]; }

  void publish(uint32_t step);
  bool has_published(int rank, uint32_t step) {
    return have_published(Ranks{rank, rank + 1}, step, std::memory_order_acquire);
  }
  void wait_for(int rank, uint32_t step) { wait_for(Ranks{rank, rank + 1}, step); }
  void wait_for_all(uint32_t step) { wait_for(Ranks{0, member.size}, step); }

  // Rings the bell of a rank, or sleeps until somebody rings ours or a moment has passed.
  void ring_bell(int rank);
  void sleep_until_bell(uint32_t heard);

  // Throws if the group is closed or any rank has given up.
  void check_broken();
  // Gives up for all ranks.
  [[noreturn]] void fail(const std::string& text);
  bool is_gone(int rank);
  std::string name_of(int rank) const;
  std::string who(int rank);
  std::string waited_for() const;  // the beginning of a message

  const Member member;
  const std::shared_ptr<File> file;
  bool spins;
  // How long a wait spins at most before it sleeps. Set before each operation.
  std::chrono::microseconds spin_time{60};
  std::atomic<bool> closing{false};

  // The operation under way, for messages and for its deadline.
  Descriptor current;
  std::atomic<uint64_t> operations{0};
  Clock::time_point deadline;
  void begin(const Descriptor& descriptor);
  std::string where(const Descriptor& descriptor) const;

 private:
  struct Ranks {
    int first, end;
  };
  void wait_for(Ranks ranks, uint32_t step);
  bool have_published(Ranks ranks, uint32_t step, std::memory_order order);
  bool spin_for(Ranks ranks, uint32_t step);
  void sleep_for(Ranks ranks, uint32_t step);
  bool is_on_our_core(int rank);
  void move_away(Clock::time_point now);
  void spin_at_least(Clock::duration wait);
  void check_missing(uint32_t step);

  const std::shared_ptr<Mapping> mapping_;
  std::vector<int> life_;
  std::vector<uint32_t> seen_;  // the last step of every rank that we know of
  int missing_ = 0;  // one that had not published when we last looked
  Clock::duration patience_;  // how long a spin may take, from what the last ones gained
  Clock::time_point last_move_;
  Clock::duration move_pause_;
  Header* header_;
  Control* controls_;
  char* slots_;
  Ring* rings_;
};

// Asked now and then by a thread that waits; true means: give up. Set by the thread's owner, so that Ctrl-C works.
extern thread_local std::function<bool()> interrupted;

// Grows in a child made by fork: threads, and the place in the group, are the parent's.
int fork_generation();

int futex_wait(std::atomic<uint32_t>& word, uint32_t value, int milliseconds);
void futex_wake(std::atomic<uint32_t>& word);
void pause_briefly();

// When so many seconds have passed; the end of time for more than the clock can count.
Clock::time_point after(double seconds);

inline bool reached(uint32_t step, uint32_t wanted) { return int32_t(step - wanted) >= 0; }

}  // namespace paceline
