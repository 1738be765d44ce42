// The forward pass of a ring (ring.hpp): its plan, and a launch.
#ifndef STROBE_RING_FORWARD_HPP_
#define STROBE_RING_FORWARD_HPP_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <strobe/ring_plan.hpp>
#include <utility>
#include <vector>

namespace strobe {
inline namespace v0 {
namespace internal {

// Plans the calls, and whose results are merged when.
inline void plan_ring_forward(RingPlan& plan) {
  plan.check_eights();
  const Problem& layer = plan.problem.layer;
  const auto own = plan.calls_of(plan.schedule.own);
  size_t calls = own.size();
  for (const RingStep& step : plan.schedule.steps) calls += plan.calls_of(step.blocks).size();
  plan.alone = calls == 1;  // there is nothing to merge
  Problem sub = layer;
  sub.out = plan.strides_of(plan.rows(), layer.heads, layer.head_dim_v, layer.out);
  for (const RingBatch& batch : plan.calls_of(plan.schedule.whole))
    plan.whole.push_back(plan.plan_call(batch, sub, plan.rows(), nullptr));
  if (!plan.alone) {
    sub.out = plan.strides_of(plan.shared_rows(), layer.heads, layer.head_dim_v, {});
    sub.out_dtype = DType::kFloat32;
    sub.has_sinks = false;  // they enter a row with its last merge
  }
  for (const RingBatch& batch : own)
    plan.own.push_back(plan.plan_call(batch, sub, plan.rows(), nullptr));
  plan.plan_steps(sub, [](int64_t) {});
  std::vector<RingCall*> all;
  for (RingCall& call : plan.own) all.push_back(&call);
  for (std::vector<RingCall>& calls_of_step : plan.steps) {
    for (RingCall& call : calls_of_step) all.push_back(&call);
  }
  std::vector<RingRows> written, closed;
  for (size_t n = 0; n < all.size(); ++n) {
    RingCall& call = *all[n];
    // Either all of these rows have a result, as their block on the diagonal came first, or this
    // is that block.
    for (const RingRows& rows : written)
      call.later = call.later || (rows.begin <= call.q.begin && call.q.end <= rows.end);
    if (!call.later) {
      written.push_back(call.q);
      written = ring_joined(std::move(written));
    }
    call.closes = std::all_of(all.begin() + static_cast<std::ptrdiff_t>(n) + 1, all.end(),
                              [&](const RingCall* after) {
                                return after->q.end <= call.q.begin || call.q.end <= after->q.begin;
                              });
    if (call.closes && call.later) closed.push_back(call.q);
  }
  if (!plan.alone) plan.single = ring_without(plan.shared_rows(), std::move(closed));
  if (!plan.alone && layer.has_sinks && !plan.problem.seqused.empty()) plan.find_unused();

  const int64_t heads = plan.batch * layer.heads;
  const int64_t halves = plan.alone ? 0 : 2;
  plan.outs = plan.take(halves * plan.shared_rows() * heads * layer.head_dim_v * 4);
  plan.lses = plan.take(2 * plan.rows() * heads * 4);
  plan.lse_part = plan.take(plan.most_queries * heads * 4);
  plan.take_messages();
  plan.finish_workspace();
}

// Partial results are float32, and are merged as they come. The first result of a row is written
// to the first half of `outs`; what follows to the second, and merged into the first; and the
// last merge of a row writes out. What the rank has whole has one result, which is out.
class RingForward : RingLaunch<ForwardArgs> {
 public:
  RingForward(const RingPlan& plan, const ForwardArgs& args, Communicator& ranks)
      : RingLaunch(plan, args, ranks) {
    out_ = tensor(args.out, layer_.heads, layer_.head_dim_v, out_dtype(), layer_.out);
    const int64_t row = plan.batch * layer_.heads * plan.rows();
    for (size_t half = 0; half < 2; ++half) {
      lses_[half] = lse(floats(plan.lses) + static_cast<int64_t>(half) * row);
      if (plan.alone) continue;
      const int64_t part = plan.batch * layer_.heads * plan.shared_rows() * layer_.head_dim_v;
      outs_[half] = partial(floats(plan.outs) + static_cast<int64_t>(half) * part, layer_.heads,
                            layer_.head_dim_v);
    }
  }

  void run() {
    upload_numbers();
    ask(0);
    for (const RingCall& call : plan_.whole) compute(call, k_, v_, out_, lses_[0], true);
    for (const RingCall& call : plan_.own) add(call, k_, v_);
    for (size_t n = 0; n < plan_.steps.size(); ++n) {
      next(n);
      const RingPair got = received(n);
      for (const RingCall& call : plan_.steps[n]) add(call, got.k, got.v);
    }
    for (const RingRows& rows : plan_.single) merge_parts(rows, 1, true);
    for (const auto& [b, rows] : plan_.unused) leave_out(b, rows);
    if (args_.lse) {
      const RingLse& all = lses_[0];
      plan_.memory.copy(args_.lse, 0, all.data, 0, RingLse::bytes(all.lines * all.rows), 1,
                        args_.stream);
    }
  }

 private:
  [[nodiscard]] DType out_dtype() const {
    return layer_.out_dtype == DType::kSame ? layer_.dtype : layer_.out_dtype;
  }
  void add(const RingCall& call, const RingTensor& k, const RingTensor& v) {
    const size_t half = call.later ? 1 : 0;
    compute(call, k, v, plan_.alone ? out_ : outs_[half], lses_[half], plan_.alone);
    if (call.later) merge_parts(call.q, 2, call.closes);
  }
  // final: the rows have no other result.
  void compute(const RingCall& call, const RingTensor& k, const RingTensor& v,
               const RingTensor& out, const RingLse& lse, bool final) const {
    ForwardArgs a = call_args(call, k, v);
    a.out = out.part(call.q).data;
    if (final) a.sinks = args_.sinks;
    const bool all = call.q.size() == plan_.rows();
    a.lse = all ? lse.data : floats(plan_.lse_part);
    call.plan.forward(a);
    if (!all) lse.take(call.q, a.lse, plan_.memory, args_.stream);
  }
  // Of one half, or of both.
  void merge_parts(const RingRows& rows, int64_t parts, bool closes) const {
    const RingTensor whole = (closes ? out_ : outs_[0]).part(rows);
    MergeArgs a = {.device = layer_.device, .device_index = layer_.device_index};
    a.out_dtype = closes ? out_dtype() : DType::kFloat32;
    a.threads = layer_.threads;
    a.parts = parts;
    a.batch = whole.batch;
    a.seqlen_q = rows.size();
    a.heads = layer_.heads;
    a.head_dim_v = layer_.head_dim_v;
    a.outs = reinterpret_cast<const float*>(outs_[0].part(rows).data);
    a.outs_strides = outs_[0].strides;
    a.outs_part = static_cast<int64_t>(outs_[0].bytes() / sizeof(float));
    a.lses = a.lse = lses_[0].data + rows.begin;
    a.lses_strides = a.lse_strides = {layer_.heads * plan_.rows(), 1, plan_.rows(), 1};
    a.lses_part = lses_[0].lines * lses_[0].rows;
    a.out = whole.data;
    a.out_strides = whole.strides;
    a.stream = args_.stream;
    if (closes) a.sinks = args_.sinks;
    merge(a);
  }
  // A row that is not in use has no sink either, which merges do not know: what is merged of no
  // parts is 0, and its lse -inf.
  void leave_out(int64_t b, const RingRows& rows) const {
    const RingTensor whole = out_.part(rows);
    MergeArgs a = {.device = layer_.device, .device_index = layer_.device_index};
    a.out_dtype = out_dtype();
    a.threads = layer_.threads;
    a.parts = 0;
    a.batch = 1;
    a.seqlen_q = rows.size();
    a.heads = layer_.heads;
    a.head_dim_v = layer_.head_dim_v;
    a.lse = lses_[0].data + b * layer_.heads * plan_.rows() + rows.begin;
    a.lse_strides = {layer_.heads * plan_.rows(), 1, plan_.rows(), 1};
    a.out = whole.data + b * whole.strides.batch * whole.size;
    a.out_strides = whole.strides;
    a.stream = args_.stream;
    merge(a);
  }

  RingTensor out_;
  std::array<RingTensor, 2> outs_ = {};
  std::array<RingLse, 2> lses_ = {};
};

}  // namespace internal
}  // namespace v0
}  // namespace strobe

#endif  // STROBE_RING_FORWARD_HPP_
