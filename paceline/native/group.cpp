#include "group.h"

namespace paceline {
namespace {

constexpr auto nap = std::chrono::milliseconds(50);

// A caller has nothing else to do, and ranks that compute the same differ by less; a thread of ours may take the core
// from a rank that computes.
constexpr auto spin_of_callers = std::chrono::microseconds(1000), spin_of_threads = std::chrono::microseconds(60);

Clock::time_point end_of(double seconds) {
  if (seconds < 0) return Clock::time_point::max();
  return after(seconds);
}

}  // namespace

Group::Group(std::shared_ptr<File> file, Member who, std::vector<int> life)
    : member(who), segment_(std::move(file), std::move(who), std::move(life)), collectives_(segment_),
      mailbox_(segment_), fork_generation_(fork_generation()) {}

Group::~Group() { close(); }

bool Group::is_usable_here() const { return fork_generation() == fork_generation_; }

void Group::submit(const TaskPointer& task, bool alone) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Failure("group '" + member.name + "' is closed");
  task->alone = alone;
  if (task->message) {
    segment_.check_broken();
    mailbox_.post(task->message);
    mailbox_.advance();
    if (!alone) return;
    if (!messenger_.joinable()) messenger_ = std::thread(&Group::move_messages, this);
  } else {
    queue_.push_back(task);
    if (!alone) return;
    if (!worker_.joinable()) worker_ = std::thread(&Group::run_collectives, this);
  }
  changed_.notify_all();
}

bool Group::is_done(const TaskPointer& task) {
  if (task->message) return mailbox_.is_done(*task->message);
  const std::lock_guard lock(mutex_);
  return task->done;
}

bool Group::wait(const TaskPointer& task, double seconds) {
  return task->message ? wait_for_message(task, seconds) : wait_for_collective(task, seconds);
}

// Whether the thread that waits wants to stop. A task that others see to goes on without it; one that uses the
// caller's memory for the time of the call must end first, and with it the group.
bool Group::gives_up(const Task& task) {
  if (!interrupted || !interrupted()) return false;
  if (task.alone) return true;
  try {
    const Descriptor& what = task.message ? task.message->what : task.call.what;
    segment_.fail(segment_.name_of(member.rank) + " was interrupted in " + segment_.where(what));
  } catch (const Failure&) {
    return false;
  }
}

// Collectives ------------------------------------------------------------------------------------------------------

// Runs the first of the queue; the lock is free meanwhile.
void Group::run_next(std::unique_lock<std::mutex>& lock, std::chrono::microseconds spin_time) {
  const TaskPointer task = queue_.front();
  queue_.pop_front();
  running_ = true;
  segment_.spin_time = spin_time;
  lock.unlock();
  std::string error;
  try {
    collectives_.run(task->call);
  } catch (const std::exception& failure) {
    error = failure.what();
  }
  lock.lock();
  running_ = false;
  task->error = std::move(error);
  task->done = true;
  changed_.notify_all();
}

bool Group::wait_for_collective(const TaskPointer& task, double seconds) {
  const auto end = end_of(seconds);
  std::unique_lock lock(mutex_);
  while (!task->done) {
    // Nobody who must be back in time may start something that can take longer.
    if (seconds < 0 && !running_ && !queue_.empty()) {
      run_next(lock, spin_of_callers);
      continue;
    }
    changed_.wait_until(lock, std::min(end, Clock::now() + nap));
    if (task->done) break;
    if (Clock::now() >= end) return false;
    lock.unlock();
    const bool give_up = gives_up(*task);
    lock.lock();
    if (give_up) return false;
  }
  return true;
}

void Group::run_collectives() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return closed_ || (!running_ && !queue_.empty()); });
    if (closed_) return;
    run_next(lock, spin_of_threads);
  }
}

// Messages ---------------------------------------------------------------------------------------------------------

bool Group::wait_for_message(const TaskPointer& task, double seconds) {
  const auto end = end_of(seconds);
  auto next_check = Clock::now() + nap;
  auto spin_end = Clock::now() + std::chrono::microseconds(segment_.spins ? 60 : 0);
  while (true) {
    const uint32_t heard = segment_.control(member.rank).bell.load(std::memory_order_seq_cst);
    const bool moved = mailbox_.advance();
    if (mailbox_.is_done(*task->message)) break;
    const auto now = Clock::now();
    if (now >= end) return false;
    if (now >= next_check) {
      mailbox_.check();
      if (gives_up(*task)) return false;
      next_check = now + nap;
    }
    if (moved) spin_end = now + std::chrono::microseconds(segment_.spins ? 60 : 0);
    else if (now < spin_end) pause_briefly();
    else segment_.sleep_until_bell(heard);
  }
  const std::lock_guard lock(mutex_);
  task->error = task->message->error;
  return task->done = true;
}

void Group::move_messages() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closed_ || !mailbox_.is_idle(); });
      if (closed_) return;
    }
    auto next_check = Clock::now() + nap;
    while (!mailbox_.is_idle()) {
      const uint32_t heard = segment_.control(member.rank).bell.load(std::memory_order_seq_cst);
      if (!mailbox_.advance()) segment_.sleep_until_bell(heard);
      if (Clock::now() < next_check) continue;
      mailbox_.check();
      next_check = Clock::now() + nap;
    }
  }
}

// The end ----------------------------------------------------------------------------------------------------------

void Group::close() {
  std::unique_lock lock(mutex_);
  if (closed_) return;
  closed_ = true;
  const std::string reason = "group '" + member.name + "' is closed";
  for (const TaskPointer& task : queue_) task->error = reason, task->done = true;
  queue_.clear();
  segment_.closing.store(true);
  segment_.control(member.rank).left.store(1, std::memory_order_release);
  changed_.notify_all();
  changed_.wait(lock, [&] { return !running_; });
  lock.unlock();
  mailbox_.fail_all(reason);
  if (worker_.joinable()) worker_.join();
  if (messenger_.joinable()) messenger_.join();
}

}  // namespace paceline
