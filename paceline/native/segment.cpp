#include "segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>

namespace paceline {

thread_local std::function<bool()> interrupted;

namespace {

constexpr int nap_milliseconds = 50;  // a dead rank is noticed within this
constexpr auto time_to_wake_up = std::chrono::microseconds(150);
constexpr Clock::duration least_patience = std::chrono::microseconds(16), most_patience = std::chrono::milliseconds(1);
// Between moves to another core. With two ranks on two cores beside four loops, pauses of 0, 4 and 20 ms gave the same
// medians. Beside one loop a fixed pause of 20 ms made a tensor of 25 MB take 8.5 ms instead of 3.9, a growing one did not.
// The longest bounds how long two ranks stay on one core.
constexpr Clock::duration least_move_pause = std::chrono::milliseconds(20), most_move_pause = 8 * least_move_pause;

size_t aligned(size_t bytes) { return (bytes + 4095) & ~size_t(4095); }

std::atomic<int> forks{0};

}  // namespace

int fork_generation() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  (void)registered;
  return forks.load();
}

Clock::time_point after(double seconds) {
  const std::chrono::duration<double> wait(seconds), rest = Clock::time_point::max() - Clock::now();
  if (wait >= rest / 2) return Clock::time_point::max();
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(wait);
}

int futex_wait(std::atomic<uint32_t>& word, uint32_t value, int milliseconds) {
  const timespec timeout{milliseconds / 1000, (milliseconds % 1000) * 1000000L};
  return syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0) == 0 ? 0 : errno;
}

void futex_wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

const char* name_of(Kind kind) {
  static constexpr const char* names[] = {"barrier", "all_reduce", "broadcast",  "reduce",            "all_gather",
                                          "reduce_scatter", "gather", "scatter", "all_to_all", "all_to_all (uneven)",
                                          "allocate", "send",       "receive"};
  return names[static_cast<int>(kind)];
}

bool Descriptor::matches(const Descriptor& other) const {
  const bool same_count = count == other.count || kind == Kind::all_to_all_uneven;
  return kind == other.kind && dtype == other.dtype && reduce == other.reduce && root == other.root && same_count;
}

std::string Descriptor::text() const {
  std::string text = name_of(kind);
  if (kind == Kind::barrier) return text;
  text += '(';
  if (kind != Kind::all_to_all_uneven) text += std::to_string(count) + ' ';
  text += name_of(dtype);
  if (reduce != Reduce::none) text += std::string(", ") + name_of(reduce);
  if (root >= 0) text += ", root " + std::to_string(root);
  return text += ')';
}

File::~File() { close(descriptor); }

std::shared_ptr<Mapping> File::map(uint64_t offset, size_t bytes) {
  return std::make_shared<Mapping>(descriptor, offset, bytes);
}

Mapping::Mapping(int descriptor, uint64_t offset, size_t bytes) : bytes(bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, static_cast<off_t>(offset));
  if (at == MAP_FAILED) throw Failure("cannot map " + std::to_string(bytes) + " bytes: " + strerror(errno));
  data = static_cast<char*>(at);
}

Mapping::~Mapping() { munmap(data, bytes); }

size_t Segment::bytes_for(int size) {
  const size_t ranks = static_cast<size_t>(size);
  return aligned(sizeof(Header) + ranks * sizeof(Control)) + ranks * 2 * slot_count * slot_bytes +
         ranks * ranks * sizeof(Ring);
}

Segment::Segment(std::shared_ptr<File> of, Member who, std::vector<int> life)
    : member(std::move(who)), file(of), spins(member.size <= member.cores), mapping_(of->map(0, bytes_for(member.size))),
      life_(std::move(life)), seen_(member.size, 0), patience_(most_patience),
      move_pause_(least_move_pause) {
  // A fresh file is all zeros, which is what every word starts from.
  header_ = reinterpret_cast<Header*>(mapping_->data);
  controls_ = reinterpret_cast<Control*>(mapping_->data + sizeof(Header));
  slots_ = mapping_->data + aligned(sizeof(Header) + member.size * sizeof(Control));
  rings_ = reinterpret_cast<Ring*>(slots_ + size_t(member.size) * 2 * slot_count * slot_bytes);
  control(member.rank).pid.store(getpid(), std::memory_order_relaxed);
}

Segment::~Segment() {
  for (const int descriptor : life_) close(descriptor);
}

void Segment::begin(const Descriptor& descriptor) {
  current = descriptor;
  ++operations;
  deadline = after(member.timeout);
}

std::string Segment::where(const Descriptor& descriptor) const {
  std::string text = descriptor.text();
  if (descriptor.kind < Kind::send) text += ", collective " + std::to_string(operations);
  return text + " of group '" + member.name + "'";
}

std::string Segment::name_of(int rank) const {
  return "rank " + std::to_string(member.numbers.empty() ? rank : member.numbers[size_t(rank)]);
}

std::string Segment::who(int rank) {
  return name_of(rank) + " (process " + std::to_string(control(rank).pid.load()) + ")";
}

std::string Segment::waited_for() const {
  char seconds[32];
  snprintf(seconds, sizeof(seconds), "%g", member.timeout);
  return name_of(member.rank) + " timed out: it waited the whole timeout of " + seconds + " s for ";
}

void Segment::publish(uint32_t step) {
  Control& own = control(member.rank);
  seen_[member.rank] = step;
  own.core.store(sched_getcpu(), std::memory_order_relaxed);
  // Sequentially consistent: a waiter either sees the step or is seen sleeping.
  own.step.store(step, std::memory_order_seq_cst);
  if (own.step_sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(own.step);
  if (header_->meeting_sleepers.load(std::memory_order_seq_cst) == 0) return;
  // Of all that publish a step, the last one sees that it is the last.
  if (!have_published(Ranks{0, member.size}, step, std::memory_order_seq_cst)) return;
  header_->meetings.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(header_->meetings);
}

bool Segment::have_published(Ranks ranks, uint32_t step, std::memory_order order) {
  for (int rank = ranks.first; rank < ranks.end; ++rank) {
    if (reached(seen_[rank], step)) continue;
    seen_[rank] = control(rank).step.load(order);
    if (!reached(seen_[rank], step)) {
      missing_ = rank;
      return false;
    }
  }
  return true;
}

void Segment::wait_for(Ranks ranks, uint32_t step) {
  if (have_published(ranks, step, std::memory_order_acquire)) return;
  if (!spin_for(ranks, step)) sleep_for(ranks, step);
}

// Spinning is wasted while the other rank has no core to run on: it even takes the time that we could use when the other
// is there again. So a spin may take little longer than those that ended well, and less with each that did not.
bool Segment::spin_for(Ranks ranks, uint32_t step) {
  if (!spins) return false;
  const auto start = Clock::now();
  if (is_on_our_core(missing_)) {
    if (spin_time >= most_patience && start >= last_move_ + move_pause_) move_away(start);
    return have_published(ranks, step, std::memory_order_acquire);
  }
  const auto end = start + std::min<Clock::duration>(spin_time, patience_);
  bool published = false;
  auto now = start;
  while (!published && now < end) {
    for (int i = 0; i < 32 && !published; ++i) {
      pause_briefly();
      published = have_published(ranks, step, std::memory_order_acquire);
    }
    if (!published) now = Clock::now();
  }
  if (published) spin_at_least(now - start);
  else patience_ = std::max(patience_ / 2, least_patience);
  return published;
}

// Two ranks on one core can only take turns, which beside other programs are of milliseconds. As never more than one of
// them wants to run, the kernel sees no reason to move the other. So the one that waits moves to a core where no rank ran
// last. If the kernel soon takes it back, the other cores are busier than this one, and it moves more and more rarely.
void Segment::move_away(Clock::time_point now) {
  const bool was_taken_back = now < last_move_ + 2 * move_pause_;
  move_pause_ = was_taken_back ? std::min(2 * move_pause_, most_move_pause) : least_move_pause;
  last_move_ = now;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  cpu_set_t others = allowed;
  for (int rank = 0; rank < member.size; ++rank) CPU_CLR(control(rank).core.load(std::memory_order_relaxed), &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof(others), &others) != 0) return;
  sched_setaffinity(0, sizeof(allowed), &allowed);  // only to be moved: it may run anywhere again
  control(member.rank).core.store(sched_getcpu(), std::memory_order_relaxed);
}

bool Segment::is_on_our_core(int rank) {
  return control(rank).core.load(std::memory_order_relaxed) == sched_getcpu();
}

// A wait of this length is worth a spin; the next ones may be somewhat longer.
void Segment::spin_at_least(Clock::duration wait) { patience_ = std::max(patience_, std::min(4 * wait, most_patience)); }

void Segment::sleep_for(Ranks ranks, uint32_t step) {
  struct Sleeper {
    std::atomic<uint32_t>& count;
    explicit Sleeper(std::atomic<uint32_t>& count) : count(count) { count.fetch_add(1, std::memory_order_seq_cst); }
    ~Sleeper() { count.fetch_sub(1, std::memory_order_relaxed); }
  };
  // For one rank we sleep until it publishes, for many until the last of them does: woken once, when all are there.
  const bool is_one = ranks.end - ranks.first == 1 || member.size == 2;
  const int peer = missing_;
  std::atomic<uint32_t>& word = is_one ? control(peer).step : header_->meetings;
  const Sleeper sleeper(is_one ? control(peer).step_sleepers : header_->meeting_sleepers);
  const auto start = Clock::now();
  auto next_check = start + std::chrono::milliseconds(nap_milliseconds);
  while (true) {
    const uint32_t heard = word.load(std::memory_order_seq_cst);
    if (have_published(ranks, step, std::memory_order_seq_cst)) break;
    futex_wait(word, heard, nap_milliseconds);
    if (Clock::now() < next_check) continue;
    check_broken();
    check_missing(step);
    next_check = Clock::now() + std::chrono::milliseconds(nap_milliseconds);
  }
  const auto wait = Clock::now() - start;
  if (wait < spin_time + time_to_wake_up && !is_on_our_core(missing_)) spin_at_least(wait);
}

void Segment::check_broken() {
  if (closing.load(std::memory_order_relaxed)) throw Failure("group '" + member.name + "' is closed");
  if (header_->broken.load(std::memory_order_acquire) == 0) return;
  // Whoever broke the group may have died between the two marks.
  for (int i = 0; i < 20 && header_->broken.load(std::memory_order_acquire) == 1; ++i) usleep(1000);
  if (header_->broken.load(std::memory_order_acquire) == 1) throw Failure("group '" + member.name + "' is broken");
  throw Failure(header_->reason);
}

void Segment::fail(const std::string& text) {
  uint32_t sound = 0;
  if (header_->broken.compare_exchange_strong(sound, 1)) {
    strncpy(header_->reason, text.c_str(), sizeof(header_->reason) - 1);
    header_->broken.store(2, std::memory_order_release);
    throw Failure(text);
  }
  check_broken();  // the first to notice speaks for all
  throw Failure(text);
}

bool Segment::is_gone(int rank) {
  if (control(rank).left.load(std::memory_order_acquire) != 0) return true;
  pollfd life{life_[rank], POLLIN, 0};
  return poll(&life, 1, 0) > 0;
}

// Someone has not come: is it dead, or too late? The step it waits for may be held up by a third rank.
void Segment::check_missing(uint32_t step) {
  std::string late;
  uint32_t latest = step;
  for (int rank = 0; rank < member.size; ++rank) {
    if (rank == member.rank) continue;
    const bool gone = is_gone(rank);  // before the step is read: it may have published and then left
    const uint32_t at = control(rank).step.load(std::memory_order_acquire);
    if (reached(at, step)) continue;
    if (gone) {
      const bool left = control(rank).left.load(std::memory_order_acquire) != 0;
      fail(who(rank) + (left ? " left the group" : " ended or was killed") + " while others were in " + where(current));
    }
    if (!reached(at, latest)) late.clear(), latest = at;
    if (at == latest) late += (late.empty() ? "" : ", ") + who(rank);
  }
  if (Clock::now() >= deadline)
    fail(waited_for() + late + " in " + where(current));
  if (interrupted && interrupted()) fail(name_of(member.rank) + " was interrupted in " + where(current));
}

void Segment::ring_bell(int rank) {
  Control& peer = control(rank);
  peer.bell.fetch_add(1, std::memory_order_seq_cst);
  if (peer.bell_sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(peer.bell);
}

void Segment::sleep_until_bell(uint32_t heard) {
  Control& own = control(member.rank);
  own.bell_sleepers.fetch_add(1, std::memory_order_seq_cst);
  futex_wait(own.bell, heard, nap_milliseconds);
  own.bell_sleepers.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace paceline
