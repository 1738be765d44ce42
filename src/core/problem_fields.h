// A problem's extents by name, beside its options (core/options.h): STROBE_RECORD writes them, and
// `strobe tune` reads them.
#ifndef STROBE_CORE_PROBLEM_FIELDS_H_
#define STROBE_CORE_PROBLEM_FIELDS_H_

#include <string_view>

#include "core/options.h"

namespace strobe {

/// visit(name, field) for each field besides direction, dtype and options that a recorded problem
/// has. P: strobe_problem, const or not. Strides and scale are not among them, nor what only a
/// launch that no table chooses for has.
template <typename P, typename Visit>
void for_each_extent(P& p, const Visit& visit) {
  visit("batch", p.batch);
  visit("seqlen_q", p.seqlen_q);
  visit("seqlen_k", p.seqlen_k);
  visit("heads", p.heads);
  visit("heads_kv", p.heads_kv);
  visit("head_dim", p.head_dim);
  visit("head_dim_v", p.head_dim_v);
  visit("varlen", p.varlen);
  visit("total_q", p.total_q);
  visit("total_k", p.total_k);
  visit("cache", p.cache);
  visit("page_size", p.page_size);
  visit("pages", p.pages);
  visit("pages_per_sequence", p.pages_per_sequence);
}

/// visit(name, field) for each option that a recorded problem has, where it is not the default.
template <typename P, typename Visit>
void for_each_recorded_option(P& p, const Visit& visit) {
  for_each_option(p, [&](const Option& option, auto& field) {
    if (std::string_view(option.field) != "scale") visit(option, field);
  });
}

}  // namespace strobe

#endif  // STROBE_CORE_PROBLEM_FIELDS_H_
