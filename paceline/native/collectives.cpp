#include "collectives.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace paceline {
namespace {

// Up to here every rank reduces everything: one meeting instead of two.
constexpr size_t reduced_by_all = 16 << 10;
// What a step moves at most: enough to pay for the meeting, little enough to stay in the cache.
constexpr size_t moved_at_once = 256 << 10;
constexpr size_t text_bytes = 512;
constexpr size_t most_of_all_ranks = size_t(1) << 46;  // of one region: less than a process can map
constexpr int everyone = -1, nobody = -2;

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }
size_t chunks_of(size_t bytes, size_t chunk) { return std::max<size_t>(1, (bytes + chunk - 1) / chunk); }

// Sets pages aside, so that a lack of memory is an error here and not a signal later.
bool reserve_range(const File& file, uint64_t offset, size_t bytes) {
  int status;
  do status = fallocate(file.descriptor, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  while (status != 0 && errno == EINTR);
  return status == 0;
}

void free_range(const File& file, uint64_t offset, size_t bytes) {
  fallocate(file.descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(bytes));
}

}  // namespace

Region::Region(std::shared_ptr<File> of, uint64_t offset, size_t part_bytes, int rank, int size, uint64_t number)
    : part_bytes(part_bytes), part_stride(round_up(part_bytes, 4096)), rank(rank), size(size), number(number),
      file(std::move(of)), offset(offset), mapping(file->map(offset, header_bytes + part_stride * size_t(size))) {}

Region::~Region() {
  if (!complete || fork_generation() != fork_generation_) return;
  // The last rank to leave gives the memory back; the file itself lives as long as the group.
  auto* released = reinterpret_cast<std::atomic<int>*>(mapping->data);
  if (released->fetch_add(1) + 1 == size) free_range(*file, offset, mapping->bytes);
}

Collectives::Collectives(Segment& segment)
    : segment_(segment), rank_(segment.member.rank), size_(segment.member.size), compared_(size_),
      file_end_(round_up(Segment::bytes_for(size_), 4096)) {}

void Collectives::run(Call& call) {
  segment_.begin(call.what);
  segment_.check_broken();
  switch (call.what.kind) {
    case Kind::barrier:
    case Kind::broadcast:
    case Kind::all_gather:
    case Kind::gather: return share(call);
    case Kind::all_reduce:
    case Kind::reduce: return all_reduce(call);
    case Kind::reduce_scatter: return reduce_scatter(call);
    case Kind::scatter:
    case Kind::all_to_all: return deal(call);
    case Kind::all_to_all_uneven: return deal_unevenly(call);
    case Kind::allocate: return allocate(call);
    case Kind::send:
    case Kind::receive: break;
  }
  throw Failure("not a collective");
}

// Steps ------------------------------------------------------------------------------------------------------------

void Collectives::start(const Descriptor& what) {
  what_ = what;
  what_.step = next_;
  what_.number = segment_.operations;
}

uint32_t Collectives::enter() {
  const uint32_t step = next_;
  await_all(step - 2);
  if (step == what_.step) segment_.descriptor(rank_, step) = what_;
  next_ = step + 1;
  return step;
}

void Collectives::await(int rank, uint32_t step) {
  segment_.wait_for(rank, step);
  compare_up_to(rank, step);
}

void Collectives::await_all(uint32_t step) {
  // First with those that are here: if we differ, nobody has to wait for the rest.
  for (int rank = 0; rank < size_; ++rank)
    if (segment_.has_published(rank, step)) compare_up_to(rank, step);
  segment_.wait_for_all(step);
  for (int rank = 0; rank < size_; ++rank) compare_up_to(rank, step);
}

void Collectives::compare_up_to(int rank, uint32_t step) {
  while (reached(step, compared_[rank] + 1)) compare(rank, ++compared_[rank]);
}

// Did the rank begin the same operation as we did in this step? A root does not wait for others, so this may be asked
// an operation later; the descriptors are kept long enough.
void Collectives::compare(int rank, uint32_t step) {
  const Descriptor &ours = segment_.descriptor(rank_, step), &theirs = segment_.descriptor(rank, step);
  if (ours.step != step || theirs.matches(ours)) return;
  segment_.fail("the ranks differ in collective " + std::to_string(ours.number) + " of group '" + segment_.member.name +
                "': " + segment_.name_of(rank_) + " is in " + ours.text() + ", " + segment_.name_of(rank) + " in " +
                theirs.text());
}

// Writes chunk after chunk, and reads the one before it from `source`.
void Collectives::pipeline(size_t chunks, const Write& write, int source, const Read& read) {
  for (size_t i = 0; i <= chunks; ++i) {
    const uint32_t step = i < chunks ? enter() : next_;
    if (i < chunks) {
      if (write) write(i, segment_.slot(rank_, step));
      segment_.publish(step);
    }
    if (i == 0 || source == nobody) continue;
    if (source == everyone) await_all(step - 1);
    else await(source, step - 1);
    if (read) read(i - 1, step - 1);
  }
}

// What a rank may stage for each of the others in one step. With more ranks than cores every step costs a turn of the
// scheduler for each of them, so that few large steps are better than many that stay in the cache.
size_t Collectives::piece_at_once() const {
  return std::max(line, (segment_.spins ? moved_at_once : slot_bytes) / size_t(size_) / line * line);
}

// Moving -----------------------------------------------------------------------------------------------------------

// Everyone who has something to say says it to all who listen.
void Collectives::share(Call& call) {
  start(call.what);
  const Kind kind = call.what.kind;
  const int root = call.what.root;
  const size_t bytes = kind == Kind::barrier ? 0 : bytes_of(call.what), chunk = moved_at_once;
  const auto part = [&](size_t i) { return std::min(chunk, bytes - i * chunk); };
  const Write say = [&](size_t i, char* slot) { copy(slot, call.input + i * chunk, part(i)); };
  const Read hear_root = [&](size_t i, uint32_t step) {
    copy(call.output + i * chunk, segment_.slot(root, step), part(i));
  };
  const Read hear_all = [&](size_t i, uint32_t step) {
    for (int from = 0; from < size_; ++from)
      if (from != rank_) copy(call.outputs[from] + i * chunk, segment_.slot(from, step), part(i));
  };

  const size_t chunks = chunks_of(bytes, chunk);
  if (kind == Kind::barrier) return pipeline(1, nullptr, everyone, nullptr);
  if (kind == Kind::broadcast && rank_ == root) return pipeline(chunks, say, nobody, nullptr);
  if (kind == Kind::broadcast) return pipeline(chunks, nullptr, root, hear_root);
  if (kind == Kind::gather && rank_ != root) return pipeline(chunks, say, nobody, nullptr);
  copy(call.outputs[rank_], call.input, bytes);
  pipeline(chunks, kind == Kind::gather ? nullptr : say, everyone, hear_all);
}

// Everyone who has pieces gives each rank its own.
void Collectives::deal(Call& call) {
  start(call.what);
  const int root = call.what.root;
  const size_t bytes = bytes_of(call.what), chunk = piece_at_once();
  const auto part = [&](size_t i) { return std::min(chunk, bytes - i * chunk); };
  const Write give = [&](size_t i, char* slot) {
    for (int to = 0; to < size_; ++to)
      if (to != rank_) copy(slot + size_t(to) * chunk, call.inputs[to] + i * chunk, part(i));
  };
  const auto take_from = [&](int from, size_t i, uint32_t step) {
    copy(call.outputs[from] + i * chunk, segment_.slot(from, step) + size_t(rank_) * chunk, part(i));
  };

  const size_t chunks = chunks_of(bytes, chunk);
  if (!call.inputs.empty()) copy(call.outputs[rank_], call.inputs[rank_], bytes);
  if (call.what.kind == Kind::all_to_all)
    return pipeline(chunks, give, everyone, [&](size_t i, uint32_t step) {
      for (int from = 0; from < size_; ++from)
        if (from != rank_) take_from(from, i, step);
    });
  if (rank_ == root) return pipeline(chunks, give, nobody, nullptr);
  pipeline(chunks, nullptr, root, [&](size_t i, uint32_t step) { take_from(root, i, step); });
}

// As deal, but first everyone tells everyone the sizes, which also says how many steps there are.
void Collectives::deal_unevenly(Call& call) {
  start(call.what);
  uint64_t largest = 0;
  pipeline(
      1, [&](size_t, char* slot) { memcpy(slot, call.input_sizes.data(), size_t(size_) * sizeof(uint64_t)); }, everyone,
      [&](size_t, uint32_t step) {
        for (int from = 0; from < size_; ++from) {
          const auto* sizes = reinterpret_cast<const uint64_t*>(segment_.slot(from, step));
          largest = std::max(largest, *std::max_element(sizes, sizes + size_));
          if (sizes[rank_] == call.output_sizes[from]) continue;
          segment_.fail(segment_.name_of(rank_) + " expects " + std::to_string(call.output_sizes[from]) +
                        " bytes from " + segment_.name_of(from) + ", which sends " + std::to_string(sizes[rank_]) +
                        ", in " + segment_.where(call.what));
        }
      });

  copy(call.outputs[rank_], call.inputs[rank_], call.input_sizes[rank_]);
  if (largest == 0) return;
  const size_t chunk = piece_at_once();
  const auto part = [&](size_t i, uint64_t bytes) { return i * chunk < bytes ? std::min(chunk, bytes - i * chunk) : 0; };
  pipeline(
      chunks_of(largest, chunk),
      [&](size_t i, char* slot) {
        for (int to = 0; to < size_; ++to)
          if (const size_t bytes = to == rank_ ? 0 : part(i, call.input_sizes[to]))
            copy(slot + size_t(to) * chunk, call.inputs[to] + i * chunk, bytes);
      },
      everyone,
      [&](size_t i, uint32_t step) {
        for (int from = 0; from < size_; ++from)
          if (const size_t bytes = from == rank_ ? 0 : part(i, call.output_sizes[from]))
            copy(call.outputs[from] + i * chunk, segment_.slot(from, step) + size_t(rank_) * chunk, bytes);
      });
}

// Reducing ---------------------------------------------------------------------------------------------------------

void Collectives::all_reduce(Call& call) {
  if (bytes_of(call.what) <= reduced_by_all) return reduce_at_once(call);
  const bool may_be_ours = call.what.kind == Kind::all_reduce && regions_tried_ != 0;
  if (may_be_ours && reduce_in_place(call)) return;
  if (!may_be_ours) start(call.what);
  reduce_in_shares(call);
}

// Small: everyone reads everything and reduces it alone.
void Collectives::reduce_at_once(Call& call) {
  start(call.what);
  const uint32_t step = enter();
  copy(segment_.slot(rank_, step), call.input, bytes_of(call.what));
  segment_.publish(step);
  if (call.what.kind == Kind::reduce && rank_ != call.what.root) return;
  await_all(step);
  const void* sources[max_ranks];
  for (int rank = 0; rank < size_; ++rank) sources[rank] = segment_.slot(rank, step);
  void* const destinations[] = {call.output};
  reduce(call.what.dtype, call.what.reduce, destinations, 1, sources, size_, call.what.count);
}

std::shared_ptr<Region> Collectives::region_of(const Call& call) const {
  for (const auto& weak : regions_) {
    std::shared_ptr<Region> region = weak.lock();
    if (!region || call.output < region->own()) continue;
    const size_t offset = static_cast<size_t>(call.output - region->own());
    if (offset < region->part_bytes && bytes_of(call.what) <= region->part_bytes - offset) return region;
  }
  return nullptr;
}

// If all ranks' buffers lie at the same place of a region, they are reduced there. Else says no, after one step.
bool Collectives::reduce_in_place(Call& call) {
  const std::shared_ptr<Region> region = region_of(call);
  if (region) {
    call.what.region = region->number;
    call.what.offset = static_cast<uint64_t>(call.output - region->own());
  }
  start(call.what);
  const uint32_t step = enter();
  segment_.publish(step);
  if (!region) return false;
  await_all(step);
  for (int rank = 0; rank < size_; ++rank) {
    const Descriptor& theirs = segment_.descriptor(rank, step);
    if (theirs.region != call.what.region || theirs.offset != call.what.offset) return false;
  }
  reduce_own_share(call, *region);
  const uint32_t end = enter();
  segment_.publish(end);
  await_all(end);
  return true;
}

// Reduces one share over all parts of the region, and writes it to all of them.
void Collectives::reduce_own_share(const Call& call, const Region& region) {
  const size_t size = size_of(call.what.dtype), count = call.what.count, grain = line / size;
  const auto border = [&](int rank) { return rank == size_ ? count : count / size_t(size_) * size_t(rank) / grain * grain; };
  const size_t start = border(rank_);
  void* parts[max_ranks];
  for (int rank = 0; rank < size_; ++rank) parts[rank] = region.part(rank) + call.what.offset + start * size;
  std::swap(parts[0], parts[rank_]);  // the own part first: it is what the others are copied from
  void* const* destinations = parts;
  const void* sources[max_ranks];
  for (int rank = 0; rank < size_; ++rank) sources[rank] = region.part(rank) + call.what.offset + start * size;
  reduce(call.what.dtype, call.what.reduce, destinations, size_, sources, size_, border(rank_ + 1) - start);
}

// Any memory: step i stages chunk i for the others, reduces the own share of chunk i - 1 and takes the other shares of
// chunk i - 2. The own share never passes through a slot on its way in.
void Collectives::reduce_in_shares(Call& call) {
  const bool listens = call.what.kind == Kind::all_reduce || rank_ == call.what.root;
  const size_t bytes = bytes_of(call.what);
  const size_t share = std::min(piece_at_once(), round_up((bytes + size_t(size_) - 1) / size_t(size_), line));
  const size_t chunk = share * size_t(size_), chunks = chunks_of(bytes, chunk);
  const auto start_of = [&](size_t i, int rank) { return std::min(bytes, i * chunk + size_t(rank) * share); };
  const auto length_of = [&](size_t i, int rank) { return std::min(share, bytes - start_of(i, rank)); };

  const auto stage = [&](size_t i, uint32_t step) {
    for (int rank = 0; rank < size_; ++rank)
      if (rank != rank_)
        copy(segment_.slot(rank_, step) + size_t(rank) * share, call.input + start_of(i, rank), length_of(i, rank));
  };
  const auto reduce_share = [&](size_t i, uint32_t staged, uint32_t step) {
    const size_t at = start_of(i, rank_);
    const void* sources[max_ranks];
    for (int rank = 0; rank < size_; ++rank)
      sources[rank] = rank == rank_ ? call.input + at : segment_.slot(rank, staged) + size_t(rank_) * share;
    void* const destinations[] = {segment_.slot(rank_, step, true), call.output + at};
    reduce(call.what.dtype, call.what.reduce, destinations, listens ? 2 : 1, sources, size_,
           length_of(i, rank_) / size_of(call.what.dtype));
  };
  const auto take = [&](size_t i, uint32_t step) {
    for (int rank = 0; rank < size_; ++rank)
      if (rank != rank_) copy(call.output + start_of(i, rank), segment_.slot(rank, step, true), length_of(i, rank));
  };

  for (size_t i = 0; i <= chunks + 1; ++i) {
    const uint32_t step = i <= chunks ? enter() : next_;
    if (i < chunks) stage(i, step);
    if (i >= 1) await_all(step - 1);
    if (i >= 1 && i <= chunks) reduce_share(i - 1, step - 1, step);
    if (i <= chunks) segment_.publish(step);
    if (i >= 2 && listens) take(i - 2, step - 1);
  }
}

// Deals the pieces of the input; each rank reduces those it gets.
void Collectives::reduce_scatter(Call& call) {
  start(call.what);
  const size_t bytes = bytes_of(call.what), chunk = piece_at_once();
  const auto part = [&](size_t i) { return std::min(chunk, bytes - i * chunk); };
  pipeline(
      chunks_of(bytes, chunk),
      [&](size_t i, char* slot) {
        for (int to = 0; to < size_; ++to)
          if (to != rank_) copy(slot + size_t(to) * chunk, call.inputs[to] + i * chunk, part(i));
      },
      everyone,
      [&](size_t i, uint32_t step) {
        const void* sources[max_ranks];
        for (int from = 0; from < size_; ++from)
          sources[from] = from == rank_ ? call.inputs[from] + i * chunk
                                        : segment_.slot(from, step) + size_t(rank_) * chunk;
        void* const destinations[] = {call.output + i * chunk};
        reduce(call.what.dtype, call.what.reduce, destinations, 1, sources, size_, part(i) / size_of(call.what.dtype));
      });
}

// Allocating -------------------------------------------------------------------------------------------------------

// Every rank provides its own part; if one cannot, none does, and all say why.
void Collectives::allocate(Call& call) {
  const size_t stride = round_up(call.what.count, 4096);
  const uint64_t offset = file_end_;
  ++regions_tried_;
  const bool fits = call.what.count <= most_of_all_ranks / size_t(size_);
  // Also if it is refused later: a rank may still be giving its part back while others make the next one.
  if (fits) file_end_ += Region::header_bytes + stride * size_t(size_);
  // Rank 0 provides the header too.
  const uint64_t own = offset + (rank_ == 0 ? 0 : Region::header_bytes + stride * size_t(rank_));
  const size_t own_bytes = stride + (rank_ == 0 ? Region::header_bytes : 0);
  std::string objection = call.objection;
  if (objection.empty() && !fits) objection = "no host has so much memory";
  try {
    if (objection.empty())
      call.region = std::make_shared<Region>(segment_.file, offset, call.what.count, rank_, size_, regions_tried_);
    if (objection.empty() && !reserve_range(*segment_.file, own, own_bytes))
      objection = std::string("cannot reserve its part: ") + strerror(errno);
  } catch (const Failure& failure) {
    objection = failure.what();
  }
  const std::string refusal = first_refusal(call.what, objection);
  if (!refusal.empty()) {
    call.region.reset();
    if (fits) free_range(*segment_.file, own, own_bytes);
    throw Failure(refusal + ", in " + segment_.where(call.what));
  }
  call.region->complete = true;
  std::erase_if(regions_, [](const auto& weak) { return weak.expired(); });
  regions_.push_back(call.region);
  madvise(call.region->mapping->data, call.region->mapping->bytes, MADV_POPULATE_WRITE);
}

// Everyone says what it objects to, and hears the others.
std::string Collectives::first_refusal(const Descriptor& what, const std::string& objection) {
  std::string refusal;
  start(what);
  pipeline(
      1, [&](size_t, char* slot) { slot[objection.copy(slot, text_bytes - 1)] = 0; }, everyone,
      [&](size_t, uint32_t step) {
        for (int rank = 0; rank < size_ && refusal.empty(); ++rank)
          if (const char* text = segment_.slot(rank, step); *text != 0)
            refusal = segment_.name_of(rank) + ": " + text;
      });
  return refusal;
}

}  // namespace paceline
