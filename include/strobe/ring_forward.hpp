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
  const std::vector<RingBatch> own = plan.calls_of(plan.schedule.own);
  std::vector<RingRows> spans, final;
  for (const RingBatch& batch : own) spans.push_back(ring_queries(batch));
  for (const RingStep& step : plan.schedule.steps)
    for (const RingBatch& batch : plan.calls_of(step.blocks)) spans.push_back(ring_queries(batch));
  plan.room.rows = ring_joined(std::move(spans));
  ring_queries_of(plan.schedule.final, final);
  Problem sub = layer;
  sub.out = plan.strides_of(plan.rows(), layer.heads, layer.head_dim_v, layer.out);
  for (const RingBatch& batch : plan.calls_of(plan.schedule.final)) {
    plan.final.push_back(plan.plan_call(batch, sub, plan.rows(), nullptr));
    plan.final.back().rows = {plan.final.back().q};
  }
  sub.out = plan.strides_of(plan.room.size(), layer.heads, layer.head_dim_v, {});
  sub.out_dtype = DType::kFloat32;
  sub.has_sinks = false;  // they enter a row with its last merge
  for (const RingBatch& batch : own) {
    plan.own.push_back(plan.plan_call(batch, sub, plan.rows(), nullptr));
    // All of a call's blocks have their queries' own keys, or none: then there is a result.
    plan.own.back().later = !batch.front().has_own();
  }
  plan.plan_steps(sub, [](int64_t) {});
  std::vector<RingCall*> all;
  for (RingCall& call : plan.own) all.push_back(&call);
  for (std::vector<RingCall>& calls_of_step : plan.steps) {
    for (RingCall& call : calls_of_step) {
      call.later = true;
      all.push_back(&call);
    }
  }
  std::vector<RingRows> done = final;
  for (size_t n = 0; n < all.size(); ++n) {
    RingCall& call = *all[n];
    call.rows = ring_without(call.q, final);
    call.closes = std::all_of(all.begin() + static_cast<std::ptrdiff_t>(n) + 1, all.end(),
                              [&](const RingCall* after) {
                                return after->q.end <= call.q.begin || call.q.end <= after->q.begin;
                              });
    if (call.closes && call.later) done.insert(done.end(), call.rows.begin(), call.rows.end());
  }
  plan.single = ring_without({0, plan.rows()}, std::move(done));
  if (layer.has_sinks && !plan.problem.seqused.empty())
    plan.find_unused(ring_without({0, plan.rows()}, std::move(final)));

  const int64_t heads = plan.batch * layer.heads;
  plan.outs = plan.take(2 * plan.room.size() * heads * layer.head_dim_v * 4);
  plan.lses = plan.take(2 * plan.rows() * heads * 4);
  plan.lse_part = plan.take(plan.most_queries * heads * 4);
  plan.take_messages();
  plan.finish_workspace();
}

// What is final is out, by its one call. Partial results of other rows are float32, in a room for
// these alone, and are merged as they come. The first result of a row is written to the first half
// of `outs`; what follows to the second, and merged into the first; and the last merge of a row
// writes out.
class RingForward : RingLaunch<ForwardArgs> {
 public:
  RingForward(const RingPlan& plan, const ForwardArgs& args, Communicator& ranks)
      : RingLaunch(plan, args, ranks) {
    out_ = tensor(args.out, layer_.heads, layer_.head_dim_v, out_dtype(), layer_.out);
    const int64_t row = plan.batch * layer_.heads * plan.rows();
    for (size_t half = 0; half < 2; ++half) {
      lses_[half] = lse(floats(plan.lses) + static_cast<int64_t>(half) * row);
      const int64_t part = plan.batch * layer_.heads * plan.room.size() * layer_.head_dim_v;
      outs_[half] = partial(floats(plan.outs) + static_cast<int64_t>(half) * part, layer_.heads,
                            layer_.head_dim_v);
    }
  }

  void run() {
    upload_numbers();
    ask(0);
    // Before all others, as it writes to rows that are between its blocks.
    for (const RingCall& call : plan_.final)
      compute(call, k_, v_, out_.part(call.q), lses_[0], true);
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
    compute(call, k, v, outs_[half].part(plan_.room.place(call.q)), lses_[half], false);
    if (!call.later) return;
    // (Rows between blocks have an lse of -inf in the second half, which changes nothing.)
    for (const RingRows& rows : call.rows) merge_parts(rows, 2, call.closes);
  }
  // final: the rows have no other result.
  void compute(const RingCall& call, const RingTensor& k, const RingTensor& v,
               const RingTensor& out, const RingLse& lse, bool final) const {
    ForwardArgs a = call_args(call, k, v);
    a.out = out.data;
    if (final) a.sinks = args_.sinks;
    const bool all = call.rows.size() == 1 && call.rows[0].size() == plan_.rows();
    a.lse = all ? lse.data : floats(plan_.lse_part);
    call.plan.forward(a);
    if (all) return;
    for (const RingRows& rows : call.rows)
      lse.take(rows, call.q, a.lse, plan_.memory, args_.stream);
  }
  // Of one half, or of both.
  void merge_parts(const RingRows& rows, int64_t parts, bool closes) const {
    const RingRows in_room = plan_.room.place(rows);
    const RingTensor whole = closes ? out_.part(rows) : outs_[0].part(in_room);
    MergeArgs a = {.device = layer_.device, .device_index = layer_.device_index};
    a.out_dtype = closes ? out_dtype() : DType::kFloat32;
    a.threads = layer_.threads;
    a.parts = parts;
    a.batch = whole.batch;
    a.seqlen_q = rows.size();
    a.heads = layer_.heads;
    a.head_dim_v = layer_.head_dim_v;
    a.outs = reinterpret_cast<const float*>(outs_[0].part(in_room).data);
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
