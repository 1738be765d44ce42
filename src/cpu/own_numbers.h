// The arrays of numbers that a launch carries, as its own.
#ifndef STROBE_CPU_OWN_NUMBERS_H_
#define STROBE_CPU_OWN_NUMBERS_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/kernel.h"
#include "core/macros.h"
#include "core/options.h"
#include "core/problem.h"
#include "core/workspace.h"

namespace strobe::cpu {

// visit(array, length) for each array of numbers that a launch carries, but for the block table.
template <typename Args, typename Visit>
void for_each_number_array(const AttentionProblem& p, Args& a, const Visit& visit) {
  if (p.varlen) visit(a.cu_seqlens_q, p.batch + 1);
  if (p.varlen && !p.cache) visit(a.cu_seqlens_k, p.batch + 1);
  for_each_array(p, a, [&](const OptionArray&, int32_t wanted, const int32_t*& numbers) {
    if (wanted) visit(numbers, p.batch);
  });
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    if (p.append == STROBE_APPEND_PACKED) visit(a.cu_seqlens_k_new, p.batch + 1);
    for_each_cache_array(p, a,
                         [&](const char*, const char*, int32_t wanted, const int32_t*& numbers) {
                           if (wanted) visit(numbers, p.batch);
                         });
  }
}

// The arguments with these arrays in the arena. Other threads may write to the caller's arrays
// while the launch runs, as a scheduler does that prepares the next step. How the work is divided,
// where rows lie and who waits for whom all come from these numbers and have to go together, so
// that the launch reads each number once, before it checks them, and from then on knows its own
// alone. The block table is too large for that: its entries have to go with nothing, and RowView
// checks each where it is used.
template <typename Args>
Args own_numbers(const AttentionProblem& p, Args args, Arena& arena) {
  for_each_number_array(p, args, [&](const int32_t*& numbers, int64_t length) {
    int32_t* const own = arena.take<int32_t>(length);
    for (int64_t i = 0; own && i < length; ++i) own[i] = read_once(numbers + i);
    numbers = own;
  });
  return args;
}

// Bytes of a workspace that they take.
inline size_t number_bytes(const AttentionProblem& p) {
  Arena arena;
  if (p.direction == STROBE_FORWARD) {
    own_numbers(p, ForwardArgs{}, arena);
  } else {
    own_numbers(p, BackwardArgs{}, arena);
  }
  return arena.used();
}

}  // namespace strobe::cpu

#endif  // STROBE_CPU_OWN_NUMBERS_H_
