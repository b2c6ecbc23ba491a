#include "mailbox.h"

#include <algorithm>

namespace paceline {
namespace {

constexpr size_t piece_bytes = 32 << 10;  // told to the other side, so that it works while we go on

// Copies to or from a ring, around its end.
void put(Ring& ring, uint64_t at, const char* from, size_t bytes) {
  const size_t start = at % ring_bytes, first = std::min(bytes, ring_bytes - start);
  copy(ring.bytes + start, from, first);
  copy(ring.bytes, from + first, bytes - first);
}

void get(const Ring& ring, uint64_t at, char* to, size_t bytes) {
  const size_t start = at % ring_bytes, first = std::min(bytes, ring_bytes - start);
  copy(to, ring.bytes + start, first);
  copy(to + first, ring.bytes, bytes - first);
}

}  // namespace

Mailbox::Mailbox(Segment& segment)
    : segment_(segment), rank_(segment.member.rank), size_(segment.member.size), sends_(size_), inboxes_(size_) {}

void Mailbox::post(const MessagePointer& message) {
  const std::lock_guard lock(mutex_);
  message->deadline = after(segment_.member.timeout);
  if (message->what.kind == Kind::send) sends_[message->peer].push_back(message);
  else if (!take_kept(message)) receives_.push_back(message);
}

bool Mailbox::advance() {
  const std::lock_guard lock(mutex_);
  bool moved = false;
  for (int peer = 0; peer < size_; ++peer) {
    if (!sends_[peer].empty()) moved |= push(peer);
    if (inboxes_[peer].current || is_wanted_from(peer)) moved |= pull(peer);
  }
  return moved;
}

bool Mailbox::is_idle() {
  const std::lock_guard lock(mutex_);
  const auto none = [](const auto& queue) { return queue.empty(); };
  const auto quiet = [](const Inbox& inbox) { return !inbox.current; };
  return receives_.empty() && std::all_of(sends_.begin(), sends_.end(), none) &&
         std::all_of(inboxes_.begin(), inboxes_.end(), quiet);
}

bool Mailbox::is_done(const Message& message) {
  const std::lock_guard lock(mutex_);
  return message.done;
}

// Sending ----------------------------------------------------------------------------------------------------------

bool Mailbox::push(int to) {
  Ring& ring = segment_.ring(rank_, to);
  bool moved = false;
  while (!sends_[to].empty()) {
    Message& message = *sends_[to].front();
    uint64_t written = ring.written.load(std::memory_order_relaxed);
    size_t space = ring_bytes - (written - ring.read.load(std::memory_order_acquire));
    if (!message.announced) {
      if (space < sizeof(Envelope)) break;
      const Envelope envelope{message.what.count, message.tag, static_cast<uint64_t>(message.what.dtype), 0};
      put(ring, written, reinterpret_cast<const char*>(&envelope), sizeof envelope);
      ring.written.store(written += sizeof envelope, std::memory_order_release);
      space -= sizeof envelope;
      message.announced = true;
      moved = true;
    }
    const size_t bytes = std::min({space, piece_bytes, message.bytes() - message.moved});
    if (bytes != 0) {
      put(ring, written, message.data + message.moved, bytes);
      ring.written.store(written + bytes, std::memory_order_release);
      message.moved += bytes;
      moved = true;
      segment_.ring_bell(to);
    }
    if (message.moved == message.bytes()) {
      finish(message);
      sends_[to].pop_front();
    } else if (bytes == 0) {
      break;
    }
  }
  if (moved) segment_.ring_bell(to);
  return moved;
}

// Receiving --------------------------------------------------------------------------------------------------------

bool Mailbox::is_wanted_from(int from) const {
  return std::any_of(receives_.begin(), receives_.end(),
                     [&](const auto& receive) { return receive->peer == any_source || receive->peer == from; });
}

bool Mailbox::pull(int from) {
  Ring& ring = segment_.ring(from, rank_);
  bool moved = false;
  while (begin_arrival(from)) {
    Arrival& arrival = *inboxes_[from].current;
    const uint64_t read = ring.read.load(std::memory_order_relaxed);
    const size_t ready = ring.written.load(std::memory_order_acquire) - read;
    const size_t bytes = std::min({ready, piece_bytes, arrival.bytes - arrival.moved});
    if (bytes != 0) {
      char* to = arrival.is_aside ? arrival.aside.data() : arrival.receiver->data;
      get(ring, read, to + arrival.moved, bytes);
      ring.read.store(read + bytes, std::memory_order_release);
      arrival.moved += bytes;
      moved = true;
      segment_.ring_bell(from);
    }
    if (arrival.moved == arrival.bytes) {
      finish(arrival);
      if (!arrival.receiver) inboxes_[from].kept.push_back(std::move(inboxes_[from].current));
      inboxes_[from].current.reset();
      moved = true;
    } else if (bytes == 0) {
      break;
    }
  }
  return moved;
}

// Makes sure that `current` is a message that may be read; says no if there is none.
bool Mailbox::begin_arrival(int from) {
  Inbox& inbox = inboxes_[from];
  if (inbox.current) return true;
  if (!is_wanted_from(from)) return false;
  Ring& ring = segment_.ring(from, rank_);
  const uint64_t read = ring.read.load(std::memory_order_relaxed);
  if (ring.written.load(std::memory_order_acquire) - read < sizeof(Envelope)) return false;
  auto arrival = std::make_unique<Arrival>();
  arrival->from = from;
  get(ring, read, reinterpret_cast<char*>(&arrival->envelope), sizeof(Envelope));
  arrival->bytes = arrival->envelope.count * size_of(static_cast<Dtype>(arrival->envelope.dtype));
  if (MessagePointer receiver = take_receiver(*arrival)) {
    bind(*arrival, receiver);
  } else {
    arrival->is_aside = true;
    arrival->aside.resize(arrival->bytes);
  }
  ring.read.store(read + sizeof(Envelope), std::memory_order_release);
  segment_.ring_bell(from);
  inbox.current = std::move(arrival);
  return true;
}

MessagePointer Mailbox::take_receiver(const Arrival& arrival) {
  for (auto at = receives_.begin(); at != receives_.end(); ++at) {
    const bool same = ((*at)->peer == any_source || (*at)->peer == arrival.from) && (*at)->tag == arrival.envelope.tag;
    if (!same) continue;
    MessagePointer receiver = *at;
    receives_.erase(at);
    return receiver;
  }
  return nullptr;
}

// Looks among the messages kept aside, oldest first; the last of them may still be arriving.
bool Mailbox::take_kept(const MessagePointer& message) {
  for (int from = 0; from < size_; ++from) {
    if (message->peer != any_source && message->peer != from) continue;
    Inbox& inbox = inboxes_[from];
    for (auto at = inbox.kept.begin(); at != inbox.kept.end(); ++at) {
      if ((*at)->envelope.tag != message->tag) continue;
      bind(**at, message);
      finish(**at);
      inbox.kept.erase(at);
      return true;
    }
    if (inbox.current && !inbox.current->receiver && inbox.current->envelope.tag == message->tag) {
      bind(*inbox.current, message);
      return true;
    }
  }
  return false;
}

void Mailbox::bind(Arrival& arrival, const MessagePointer& receiver) {
  const Descriptor sent{Kind::send, static_cast<Dtype>(arrival.envelope.dtype), Reduce::none, -1, arrival.envelope.count};
  receiver->peer = arrival.from;
  arrival.receiver = receiver;
  if (sent.dtype == receiver->what.dtype && sent.count == receiver->what.count) return;
  // Where the bytes should go does not fit them; the group ends here, so they are not read.
  try {
    segment_.fail(segment_.name_of(rank_) + " is in " + receiver->what.text() + " of group '" +
                  segment_.member.name + "', but " + segment_.name_of(arrival.from) + " sent it " + sent.text());
  } catch (const Failure& failure) {
    arrival.receiver = nullptr;
    arrival.is_aside = true;
    arrival.aside.resize(arrival.bytes);
    finish(*receiver, failure.what());
  }
}

void Mailbox::finish(Arrival& arrival) {
  if (!arrival.receiver) return;
  if (arrival.is_aside) copy(arrival.receiver->data, arrival.aside.data(), arrival.bytes);
  finish(*arrival.receiver);
}

void Mailbox::finish(Message& message, const std::string& error) {
  message.error = error;
  message.done = true;
  segment_.ring_bell(rank_);  // whoever waits for it may be asleep
}

// Faults -----------------------------------------------------------------------------------------------------------

void Mailbox::fail_all(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  for (auto& queue : sends_) {
    for (auto& message : queue) finish(*message, reason);
    queue.clear();
  }
  for (auto& message : receives_) finish(*message, reason);
  receives_.clear();
  for (auto& inbox : inboxes_) {
    if (inbox.current && inbox.current->receiver) finish(*inbox.current->receiver, reason);
    inbox.current.reset();
  }
}

void Mailbox::check() {
  std::vector<bool> gone(size_);
  for (int peer = 0; peer < size_; ++peer) gone[peer] = peer != rank_ && segment_.is_gone(peer);
  const bool alone = size_ > 1 && std::count(gone.begin(), gone.end(), true) == size_ - 1;
  advance();  // what they sent before they left is still there
  try {
    segment_.check_broken();
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    const auto look_at = [&](const Message& message) {
      const bool any = message.peer == any_source;
      const std::string peer = any ? "any rank" : segment_.who(message.peer);
      const std::string what = (message.what.kind == Kind::send ? " to " : " from ") + peer + ", " + segment_.where(message.what);
      if (any ? alone : gone[message.peer])
        segment_.fail((any ? "all other ranks" : peer) + " ended, was killed or left during a message" + what);
      if (now >= message.deadline)
        segment_.fail(segment_.waited_for() + "a message" + what);
    };
    for (const auto& queue : sends_)
      if (!queue.empty()) look_at(*queue.front());
    for (const auto& message : receives_) look_at(*message);
    for (const auto& inbox : inboxes_)
      if (inbox.current && inbox.current->receiver) look_at(*inbox.current->receiver);
  } catch (const Failure& failure) {
    fail_all(failure.what());
  }
}

}  // namespace paceline
