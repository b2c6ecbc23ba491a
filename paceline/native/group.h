// A group as Python sees it: calls are queued in order and run by whoever waits for them, or by a thread of ours.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "collectives.h"
#include "mailbox.h"

namespace paceline {

// A collective, or a message, that has been asked for.
struct Task {
  Call call;
  MessagePointer message;  // for those between two ranks
  bool alone = false;      // threads of ours see to it
  bool done = false;
  std::string error;
};

using TaskPointer = std::shared_ptr<Task>;

class Group {
 public:
  Group(std::shared_ptr<File> file, Member member, std::vector<int> life);
  ~Group();

  // Adds a task. Somebody must `wait` for it unless it is `alone`: then threads of ours see to it.
  void submit(const TaskPointer& task, bool alone);
  // Waits at most so many seconds (forever if negative) and says whether the task is done.
  bool wait(const TaskPointer& task, double seconds);
  bool is_done(const TaskPointer& task);
  // Fails everything under way; other ranks that wait for this one are told.
  void close();

  // False in a child made by fork: its threads and its place in the group are the parent's.
  bool is_usable_here() const;

  const Member member;

 private:
  bool gives_up(const Task& task);
  bool wait_for_collective(const TaskPointer& task, double seconds);
  bool wait_for_message(const TaskPointer& task, double seconds);
  void run_next(std::unique_lock<std::mutex>& lock, std::chrono::microseconds spin_time);
  void run_collectives();
  void move_messages();

  Segment segment_;
  Collectives collectives_;
  Mailbox mailbox_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<TaskPointer> queue_;
  bool running_ = false;  // somebody runs a collective
  bool closed_ = false;
  std::thread worker_, messenger_;
  const int fork_generation_;
};

}  // namespace paceline
