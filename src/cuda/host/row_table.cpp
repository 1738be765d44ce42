#include "cuda/host/row_table.h"

#include <iterator>

namespace strobe::cuda {

#define STROBE_forward_ROW(name, when) extern const ForwardRow name;
#define STROBE_cached_ROW(name, when) extern const CachedRow name;
#define STROBE_backward_ROW(name, when) extern const BackwardRow name;
#include "cuda_rows.inc"

namespace {

constexpr When any = When::kAny, plain = When::kPlain, few = When::kFew, some = When::kSome,
               few_queries = When::kFewQueries, runs = When::kRuns, small = When::kSmall;

// The null entry at the end keeps an array from being empty.
#define STROBE_forward_ROW(name, when) {&name, #name, when},
constexpr Entry<ForwardRow> kForward[] = {
#include "cuda_rows.inc"
    {nullptr, nullptr, any}};
#define STROBE_backward_ROW(name, when) {&name, #name, when},
constexpr Entry<BackwardRow> kBackward[] = {
#include "cuda_rows.inc"
    {nullptr, nullptr, any}};
#define STROBE_cached_ROW(name, when) {&name, #name, when},
constexpr Entry<CachedRow> kCached[] = {
#include "cuda_rows.inc"
    {nullptr, nullptr, any}};

}  // namespace

template <>
std::span<const Entry<ForwardRow>> row_table<ForwardRow>() {
  return {kForward, std::size(kForward) - 1};
}
template <>
std::span<const Entry<BackwardRow>> row_table<BackwardRow>() {
  return {kBackward, std::size(kBackward) - 1};
}

template <>
std::span<const Entry<CachedRow>> row_table<CachedRow>() {
  return {kCached, std::size(kCached) - 1};
}

}  // namespace strobe::cuda
