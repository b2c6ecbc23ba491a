// Ranks as threads of one process, doing everything at once, for the sanitizers: they do not see across processes.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "group.h"

using namespace paceline;

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "does not hold: %s\n", what);
  __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
}

// One mapping of each part for all ranks: in two mappings of the same memory a sanitizer sees two memories.
struct OneMapping : File {
  using File::File;
  std::shared_ptr<Mapping> map(uint64_t offset, size_t bytes) override {
    const std::lock_guard lock(mutex);
    std::shared_ptr<Mapping> mapping = mappings[offset].lock();
    if (!mapping) mappings[offset] = mapping = File::map(offset, bytes);
    return mapping;
  }
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<Mapping>> mappings;
};

using Work = std::function<void(Group&, int rank, int size)>;

void with_ranks(int size, double timeout, const Work& work) {
  const auto file = std::make_shared<OneMapping>(memfd_create("stress", 0));
  if (ftruncate(file->descriptor, static_cast<off_t>(Segment::bytes_for(size))) != 0) abort();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.emplace_back([=, &work] {
      std::vector<int> life;
      for (int i = 0; i < size; ++i) life.push_back(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
      Group group(file, Member{rank, size, 2, timeout, "stress", {}}, std::move(life));
      work(group, rank, size);
      group.close();
    });
  for (std::thread& rank : ranks) rank.join();
}

TaskPointer task(Kind kind, Reduce reduce, int root, std::vector<float>& values) {
  auto task = std::make_shared<Task>();
  task->call.what = {kind, Dtype::f32, reduce, root, values.size()};
  task->call.input = reinterpret_cast<const char*>(values.data());
  task->call.output = reinterpret_cast<char*>(values.data());
  return task;
}

TaskPointer message(Kind kind, int peer, int64_t tag, std::vector<float>& values) {
  auto task = std::make_shared<Task>();
  task->message = std::make_shared<Message>();
  task->message->what = {kind, Dtype::f32, Reduce::none, -1, values.size()};
  task->message->peer = peer;
  task->message->tag = tag;
  task->message->data = reinterpret_cast<char*>(values.data());
  return task;
}

void run(Group& group, const TaskPointer& task, bool alone) {
  group.submit(task, alone);
  expect(group.wait(task, -1), "a task that is waited for is done");
  expect(task->error.empty(), task->error.c_str());
}

bool all_are(const std::vector<float>& values, float wanted) {
  for (const float value : values)
    if (value != wanted) return false;
  return true;
}

void reduce_and_move(Group& group, int rank, int size) {
  for (int round = 0; round < 30; ++round)
    for (const size_t count : {size_t(0), size_t(1), size_t(3000), size_t(9001), size_t(150'001)}) {
      const bool alone = (round + rank) % 3 == 0;
      std::vector<float> values(count, float(rank + 1));
      run(group, task(Kind::all_reduce, Reduce::sum, -1, values), alone);
      expect(all_are(values, float(size * (size + 1) / 2)), "all_reduce");
      std::fill(values.begin(), values.end(), float(rank));
      run(group, task(Kind::broadcast, Reduce::none, round % size, values), alone);
      expect(all_are(values, float(round % size)), "broadcast");
      std::fill(values.begin(), values.end(), float(rank));
      run(group, task(Kind::reduce, Reduce::max, round % size, values), alone);
      expect(rank != round % size || all_are(values, float(size - 1)), "reduce");

      std::vector<float> pieces(count * size_t(size), float(rank)), places(pieces.size());
      const auto exchange = task(Kind::all_to_all, Reduce::none, -1, values);
      for (int i = 0; i < size; ++i) {
        exchange->call.inputs.push_back(reinterpret_cast<const char*>(pieces.data() + size_t(i) * count));
        exchange->call.outputs.push_back(reinterpret_cast<char*>(places.data() + size_t(i) * count));
      }
      run(group, exchange, alone);
      for (int i = 0; i < size; ++i)
        expect(count == 0 || (places[size_t(i) * count] == float(i) && places[size_t(i + 1) * count - 1] == float(i)), "all_to_all");
    }
}

void reduce_in_place(Group& group, int rank, int size) {
  for (int round = 0; round < 5; ++round) {
    const auto allocation = std::make_shared<Task>();
    allocation->call.what = {Kind::allocate, Dtype::u8, Reduce::none, -1, 400'000};
    run(group, allocation, false);
    auto* values = reinterpret_cast<float*>(allocation->call.region->own());
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::fill(values, values + 100'000, float(rank));
      const auto reduction = std::make_shared<Task>();
      reduction->call.what = {Kind::all_reduce, Dtype::f32, Reduce::max, -1, 100'000};
      reduction->call.input = reduction->call.output = reinterpret_cast<char*>(values);
      run(group, reduction, repeat % 2 == 0);
      expect(values[0] == float(size - 1) && values[99'999] == float(size - 1), "all_reduce in place");
    }
  }
}

void send_around(Group& group, int rank, int size) {
  for (int round = 0; round < 40; ++round) {
    std::vector<std::vector<float>> out, in;
    std::vector<TaskPointer> tasks;
    const size_t count = round % 2 == 0 ? 10 : 100'000;
    for (int peer = 0; peer < size; ++peer) {
      out.emplace_back(count, float(rank));
      in.emplace_back(count);
    }
    std::vector<float> total(count, 1);
    for (int peer = 0; peer < size; ++peer) tasks.push_back(message(Kind::send, peer, round, out[size_t(peer)]));
    for (int peer = size - 1; peer >= 0; --peer) tasks.push_back(message(Kind::receive, peer, round, in[size_t(peer)]));
    for (const TaskPointer& each : tasks) group.submit(each, true);
    run(group, task(Kind::all_reduce, Reduce::sum, -1, total), round % 3 == 0);
    for (const TaskPointer& each : tasks) expect(group.wait(each, -1) && each->error.empty(), "a message arrives");
    for (int peer = 0; peer < size; ++peer) expect(all_are(in[size_t(peer)], float(peer)), "what a message says");
    expect(all_are(total, float(size)), "all_reduce among messages");
  }
}

void disagree(Group& group, int rank, int) {
  std::vector<float> values(rank == 0 ? 100'000 : 100'001);
  const auto wrong = task(Kind::all_reduce, Reduce::sum, -1, values);
  group.submit(wrong, rank == 1);
  group.wait(wrong, -1);
  expect(wrong->error.find("the ranks differ in collective 1") != std::string::npos, "ranks that differ are told");
}

void leave_early(Group& group, int rank, int) {
  if (rank == 0) return;
  std::vector<float> values(100'000);
  const auto lonely = task(Kind::all_reduce, Reduce::sum, -1, values);
  const auto unheard = message(Kind::receive, 0, 0, values);
  group.submit(unheard, true);
  group.submit(lonely, true);
  if (rank == 1) return group.close();  // with both under way
  group.wait(lonely, -1);
  group.wait(unheard, -1);
  expect(!lonely->error.empty() && !unheard->error.empty(), "a rank that left is noticed");
}

}  // namespace

int main() {
  for (const int size : {1, 2, 3, 5}) {
    with_ranks(size, 60, reduce_and_move);
    with_ranks(size, 60, reduce_in_place);
    with_ranks(size, 60, send_around);
  }
  with_ranks(2, 60, disagree);
  with_ranks(3, 60, leave_early);
  printf("%s\n", failures == 0 ? "all held" : "FAILED");
  return failures == 0 ? 0 : 1;
}
