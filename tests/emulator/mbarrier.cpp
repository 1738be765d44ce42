// mbarriers, and the copies that count towards them.
#include <algorithm>
#include <cstring>
#include <utility>

#include "launch_state.h"

namespace strobe::emulator {

namespace {

// In the upper half of an mbarrier's eight bytes; in the lower half is its number. (Nothing may
// write there but these functions.)
constexpr uint64_t kMark = uint64_t{0x6d626172} << 32;
constexpr uint32_t kRankShift = 24, kOffsetBits = (1u << kRankShift) - 1;

// The block and the offset in its shared memory that an address means.
struct Place {
  Block& block;
  uint32_t at;
};
Place place_of(uint32_t address, uint32_t bytes) {
  Block& own = *launch->now->block;
  const uint32_t rank = address >> kRankShift, at = (address & kOffsetBits) - kSharedBase;
  if (at > launch->shared_bytes || launch->shared_bytes - at < bytes || rank > own.cluster.size()) {
    fail(std::to_string(bytes) + " bytes at shared address " + std::to_string(at) +
         " of a cluster, of " + std::to_string(launch->shared_bytes));
  }
  Block& block = rank == 0 ? own : *own.cluster[rank - 1];
  if (block.running == 0) fail("shared memory of a thread block that has ended");
  return {block, at};
}

Mbarrier& mbarrier_at(uint32_t address) {
  const Place place = place_of(address, 8);
  uint64_t word;
  std::memcpy(&word, shared_of(place.block) + place.at, 8);
  const uint64_t number = word - kMark;
  if (number >= place.block.mbarriers.size() ||
      place.block.mbarriers[number].address != place.at + kSharedBase) {
    fail("no mbarrier at shared address " + std::to_string(place.at));
  }
  return place.block.mbarriers[number];
}

void end_phase_if_over(Block& b, Mbarrier& m) {
  if (m.pending > 0 || m.bytes != 0) return;
  m.pending = m.count;
  ++m.phase;
  wake(b, WaitsFor::kMbarrier, m.number);
}

bool is_skipped(const Mbarrier& m) { return m.number == settings().skipped_mbarrier; }

}  // namespace

void begin_mbarriers(Block& b) {
  const Quiet quiet;
  b.mbarriers.clear();
  b.copies.clear();
  b.unfenced.assign((launch->shared_bytes + 15) / 16, 0);
}

std::string describe_mbarrier(const Block& b, int number) {
  const Mbarrier& m = b.mbarriers[static_cast<size_t>(number)];
  return " " + std::to_string(number) + ", shared address " +
         std::to_string(m.address - kSharedBase) + ": " + std::to_string(m.pending) + " of " +
         std::to_string(m.count) + " arrivals and " + std::to_string(m.bytes) +
         " bytes are missing";
}

void mbarrier_init(uint32_t address, uint32_t count) {
  Block& b = *launch->now->block;
  if (count == 0) fail("an mbarrier without arrivals");
  const Quiet quiet;
  const uint64_t word = kMark + b.mbarriers.size();
  std::memcpy(shared_at(address, 8), &word, 8);
  Mbarrier& m = b.mbarriers.emplace_back();
  m.address = address;
  m.number = static_cast<int>(b.mbarriers.size()) - 1;
  m.count = m.pending = count;
}

void mbarrier_arrive(uint32_t address, uint32_t count, uint32_t bytes) {
  Mbarrier& m = mbarrier_at(address);
  Block& b = place_of(address, 8).block;
  if (m.pending < count) {
    fail("arrives at mbarrier" + describe_mbarrier(b, m.number) + ", once too often");
  }
  STROBE_TSAN(__tsan_release(&m.order[m.phase % 2]));
  m.bytes += bytes;
  m.pending -= count;
  end_phase_if_over(b, m);
}

bool mbarrier_test(uint32_t address, uint32_t parity) {
  poll();
  const Mbarrier& m = mbarrier_at(address);
  if (is_skipped(m)) return true;
  if (m.phase % 2 == parity) return false;
  STROBE_TSAN(__tsan_acquire(const_cast<char*>(&m.order[parity])));
  return true;
}

void mbarrier_wait(uint32_t address, uint32_t parity) {
  Mbarrier& m = mbarrier_at(address);
  if (is_skipped(m)) return;
  // (Whose turn comes after the next phase too has missed this one, as on the device.)
  while (m.phase % 2 == parity) wait_here("mbarrier", WaitsFor::kMbarrier, m.number);
  STROBE_TSAN(__tsan_acquire(&m.order[parity]));
}

void start_copy(uint32_t to, uint32_t bytes, uint32_t mbarrier, std::function<void(char*)> land) {
  const Place place = place_of(to, bytes);
  char* const memory = shared_of(place.block) + place.at;
  note_write(memory, bytes);
  std::memset(memory, settings().unwritten, bytes);
  Mbarrier& m = mbarrier_at(mbarrier);
  if (&place_of(mbarrier, 8).block != &place.block)
    fail("a copy that counts towards another thread block's mbarrier");
  const Quiet quiet;
  place.block.copies.push_back({place.at, bytes, 0, &m, std::move(land), std::make_unique<char>()});
  STROBE_TSAN(__tsan_release(place.block.copies.back().order.get()));
  ++launch->copies;
}

void arrive_after_copies(uint32_t mbarrier) {
  Mbarrier& m = mbarrier_at(mbarrier);
  Thread& t = *launch->now;
  const Quiet quiet;
  const auto land = [copies = std::exchange(t.copies, {})](char* shared_memory) {
    for (const Copy& copy : copies) {
      char* const to = shared_memory + (copy.to - kSharedBase);
      note_write(to, 16);
      std::memset(to, 0, 16);
      if (copy.read == 0) continue;
      note_read(copy.from, copy.read);
      std::memcpy(to, copy.from, copy.read);
    }
  };
  t.block->copies.push_back({0, 0, 1, &m, land, std::make_unique<char>()});
  STROBE_TSAN(__tsan_release(t.block->copies.back().order.get()));
  ++launch->copies;
}

void land_some_copy() {
  const Quiet quiet;
  // Of any block that has some, any.
  std::vector<Block*> having;
  for (Block* b : launch->live)
    if (!b->copies.empty()) having.push_back(b);
  Block& b = *having[draw_below(having.size())];
  std::swap(b.copies[draw_below(b.copies.size())], b.copies.back());
  const AsyncCopy copy = std::move(b.copies.back());
  b.copies.pop_back();
  --launch->copies;
  char* const to = shared_of(b) + copy.to;
#if STROBE_EMULATOR_TSAN
  // By a thread of its own, which comes after the one that issued the copy.
  void* const interrupted = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(launch->copier, __tsan_switch_to_fiber_no_sync);
  __tsan_acquire(copy.order.get());
  ignore_accesses();
#endif
  note_write(to, copy.bytes);
  copy.land(to);
#if STROBE_EMULATOR_TSAN
  heed_accesses();
  __tsan_release(&copy.mbarrier->order[copy.mbarrier->phase % 2]);
  __tsan_switch_to_fiber(interrupted, __tsan_switch_to_fiber_no_sync);
#endif
  std::fill_n(b.unfenced.begin() + copy.to / 16, (copy.bytes + 15) / 16, uint16_t{0});
  copy.mbarrier->bytes -= copy.bytes;
  if (copy.mbarrier->pending < copy.arrivals) launch->failure = "copies arrive once too often";
  copy.mbarrier->pending -= copy.arrivals;
  end_phase_if_over(b, *copy.mbarrier);
}

void wrote_shared(uint32_t address, uint32_t bytes) {
  const Quiet quiet;
  Thread& t = *launch->now;
  const auto own = static_cast<uint16_t>(t.number + 1);
  const uint32_t at = address - kSharedBase;
  for (uint32_t unit = at / 16; unit <= (at + bytes - 1) / 16; ++unit) {
    if (t.block->unfenced[unit] == own) continue;
    t.block->unfenced[unit] = own;
    t.unfenced.push_back(unit);
  }
}

void fence_proxy_async() {
  Thread& t = *launch->now;
  const auto own = static_cast<uint16_t>(t.number + 1);
  for (const uint32_t unit : t.unfenced) {
    uint16_t& writer = t.block->unfenced[unit];
    if (writer == own) writer = 0;
  }
  t.unfenced.clear();
}

void expect_fenced(const char* name, uint32_t address, uint32_t bytes) {
  const Block& b = *launch->now->block;
  const uint32_t at = address - kSharedBase;
  for (uint32_t unit = at / 16; unit <= (at + bytes - 1) / 16; ++unit) {
    if (b.unfenced[unit] == 0) continue;
    fail(std::string(name) + " reads shared address " + std::to_string(16 * unit) +
         ", where thread " + std::to_string(b.unfenced[unit] - 1) +
         " has written without fence.proxy.async");
  }
}

uint32_t cluster_rank() {
  const auto& cluster = launch->now->block->cluster;
  return static_cast<uint32_t>(std::find(cluster.begin(), cluster.end(), launch->now->block) -
                               cluster.begin());
}

uint32_t cluster_address(uint32_t address, uint32_t rank) {
  return (address & kOffsetBits) | (rank + 1) << kRankShift;
}

std::function<const char*()> own_shared(uint32_t address, uint32_t bytes) {
  const Place place = place_of(address, bytes);
  Block* const block = &place.block;
  const uint32_t at = place.at;
  return [block, at] { return shared_of(*block) + at; };
}

}  // namespace strobe::emulator
