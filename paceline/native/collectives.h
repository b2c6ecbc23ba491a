// The collectives themselves: each runs on the calling thread, from its first step to its last.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "segment.h"

namespace paceline {

// Memory that all ranks have mapped, one part per rank; what lies in it is reduced where it lies.
struct Region {
  Region(std::shared_ptr<File> file, uint64_t offset, size_t part_bytes, int rank, int size, uint64_t number);
  ~Region();

  char* part(int of) const { return mapping->data + header_bytes + size_t(of) * part_stride; }
  char* own() const { return part(rank); }

  static constexpr size_t header_bytes = 4096;
  const size_t part_bytes;
  const size_t part_stride;
  const int rank, size;
  const uint64_t number;
  bool complete = false;  // all ranks have provided their parts
  const std::shared_ptr<File> file;
  const uint64_t offset;
  const std::shared_ptr<Mapping> mapping;

 private:
  const int fork_generation_ = fork_generation();
};

// One call, as a rank makes it. Pieces are in rank order.
struct Call {
  Descriptor what;
  const char* input = nullptr;
  char* output = nullptr;
  std::vector<const char*> inputs;    // one piece per receiver
  std::vector<char*> outputs;         // one piece per sender
  std::vector<uint64_t> input_sizes;  // in bytes; only for the uneven exchange
  std::vector<uint64_t> output_sizes;
  std::string objection;             // why this rank cannot allocate
  std::shared_ptr<Region> region;    // what allocate made
};

class Collectives {
 public:
  explicit Collectives(Segment& segment);
  void run(Call& call);

 private:
  using Write = std::function<void(size_t chunk, char* slot)>;
  using Read = std::function<void(size_t chunk, uint32_t step)>;

  // The steps of an operation: `enter` begins the next one, once its slots are free.
  void start(const Descriptor& what);
  uint32_t enter();
  void await(int rank, uint32_t step);
  void await_all(uint32_t step);
  void compare_up_to(int rank, uint32_t step);
  void compare(int rank, uint32_t step);
  void pipeline(size_t chunks, const Write& write, int source, const Read& read);

  void all_reduce(Call& call);
  bool reduce_in_place(Call& call);
  void reduce_at_once(Call& call);
  void reduce_in_shares(Call& call);
  void share(Call& call);
  void deal(Call& call);
  void deal_unevenly(Call& call);
  void reduce_scatter(Call& call);
  void allocate(Call& call);
  std::string first_refusal(const Descriptor& what, const std::string& objection);
  std::shared_ptr<Region> region_of(const Call& call) const;
  void reduce_own_share(const Call& call, const Region& region);

  size_t piece_at_once() const;
  size_t bytes_of(const Descriptor& what) const { return what.count * size_of(what.dtype); }

  Segment& segment_;
  const int rank_, size_;
  uint32_t next_ = 1;   // the step that comes next
  Descriptor what_;     // the operation under way
  std::vector<uint32_t> compared_;  // the last step of each rank at which we know that it did as we did
  std::vector<std::weak_ptr<Region>> regions_;
  uint64_t regions_tried_ = 0;
  uint64_t file_end_;
};

}  // namespace paceline
