// Messages between two ranks: in order for each pair and tag, and independent of the collectives.
//
// Bytes go through one ring per pair and direction. Nothing here waits: `advance` moves what can be moved, so messages in
// both directions at once cannot block each other. A message nobody asked for stays in its ring, and so holds up its
// sender, unless a receiver wants a later one from the same sender; then it is kept aside in memory.
#pragma once

#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "segment.h"

namespace paceline {

constexpr int any_source = -1;

struct Message {
  Descriptor what;  // count and type
  int peer = any_source;
  int64_t tag = 0;
  char* data = nullptr;
  size_t moved = 0;
  bool announced = false;
  Clock::time_point deadline;
  bool done = false;
  std::string error;

  size_t bytes() const { return what.count * size_of(what.dtype); }
};

using MessagePointer = std::shared_ptr<Message>;

class Mailbox {
 public:
  explicit Mailbox(Segment& segment);

  void post(const MessagePointer& message);
  // Moves what can be moved; says whether anything was.
  bool advance();
  // Fails messages whose peer has died or whose time is up.
  void check();
  void fail_all(const std::string& reason);
  bool is_idle();
  bool is_done(const Message& message);

 private:
  struct Envelope {
    uint64_t count;
    int64_t tag;
    uint64_t dtype;
    uint64_t unused;
  };
  // A message on its way in: to its receiver if there is one, else to memory of our own.
  struct Arrival {
    Envelope envelope;
    int from;
    size_t bytes = 0, moved = 0;
    MessagePointer receiver;
    std::vector<char> aside;
    bool is_aside = false;
  };
  struct Inbox {
    std::unique_ptr<Arrival> current;
    std::list<std::unique_ptr<Arrival>> kept;
  };

  bool push(int to);
  bool pull(int from);
  bool begin_arrival(int from);
  MessagePointer take_receiver(const Arrival& arrival);
  bool is_wanted_from(int from) const;
  bool take_kept(const MessagePointer& message);
  void bind(Arrival& arrival, const MessagePointer& receiver);
  void finish(Message& message, const std::string& error = "");
  void finish(Arrival& arrival);

  Segment& segment_;
  const int rank_, size_;
  std::mutex mutex_;
  std::vector<std::deque<MessagePointer>> sends_;  // by receiver
  std::list<MessagePointer> receives_;             // without a message yet, in the order of the calls
  std::vector<Inbox> inboxes_;                     // by sender
};

}  // namespace paceline
