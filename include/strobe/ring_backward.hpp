// The backward pass of a ring (ring.hpp): its plan, and a launch.
#ifndef STROBE_RING_BACKWARD_HPP_
#define STROBE_RING_BACKWARD_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <strobe/ring_plan.hpp>
#include <vector>

namespace strobe {
inline namespace v0 {
namespace internal {

// Plans the calls: those of the rank's own keys come before and behind the others.
inline void plan_ring_backward(RingPlan& plan) {
  plan.check_eights();
  const Problem& layer = plan.problem.layer;
  Problem sub = layer;
  sub.out = plan.strides_of(plan.rows(), layer.heads, layer.head_dim_v, layer.out);
  sub.dout = plan.strides_of(plan.rows(), layer.heads, layer.head_dim_v, layer.dout);
  sub.dq = plan.strides_of(plan.rows(), layer.heads, layer.head_dim, layer.dq);
  sub.dk = plan.strides_of(plan.rows(), layer.heads_kv, layer.head_dim, layer.dk);
  sub.dv = plan.strides_of(plan.rows(), layer.heads_kv, layer.head_dim_v, layer.dv);
  const RingSchedule& schedule = plan.schedule;
  const auto plan_final = [&](const std::vector<RingBlock>& blocks, std::vector<RingCall>& calls) {
    for (const RingBatch& batch : plan.calls_of(blocks))
      calls.push_back(plan.plan_call(batch, sub, plan.rows(), nullptr));
  };
  plan_final(schedule.final_first, plan.final);
  plan_final(schedule.final_last, plan.final_last);
  plan.summed_q = schedule.summed_q();
  plan.summed_k = schedule.summed_k();
  // A row adds to the gradient of sinks once, where its own key is among the keys; those of edges
  // do with final ones.
  struct Summed {
    const std::vector<RingBlock>& blocks;
    bool counts;
    std::vector<RingCall>& calls;
    std::vector<RingBatch> batches = {};
  };
  std::vector<Summed> summed = {{schedule.edges, false, plan.edges}};
  for (const bool counts : {true, false}) {
    summed.push_back({schedule.own_first, counts, plan.own});
    summed.push_back({schedule.own_last, counts, plan.own_last});
  }
  std::vector<RingRows> spans = plan.summed_k;
  for (Summed& some : summed) {
    std::vector<RingBlock> blocks;
    for (const RingBlock& block : some.blocks)
      if (&some.blocks == &schedule.edges || (block.has_own() && layer.has_dsinks) == some.counts)
        blocks.push_back(block);
    some.batches = plan.calls_of(blocks);
    for (const RingBatch& batch : some.batches) {
      spans.push_back(ring_queries(batch));
      spans.push_back(ring_keys(batch));
    }
  }
  for (const RingStep& step : schedule.steps)
    for (const RingBatch& batch : plan.calls_of(step.blocks)) spans.push_back(ring_queries(batch));
  plan.room.rows = ring_joined(std::move(spans));
  sub.grad_dtype = DType::kFloat32;
  sub.accumulate = true;
  sub.dq = plan.strides_of(plan.room.size(), layer.heads, layer.head_dim, {});
  const auto gradients = [&](int64_t keys) {
    sub.dk = plan.strides_of(keys, layer.heads_kv, layer.head_dim, {});
    sub.dv = plan.strides_of(keys, layer.heads_kv, layer.head_dim_v, {});
  };
  gradients(plan.room.size());
  for (const Summed& some : summed) {
    sub.has_dsinks = sub.has_sinks = some.counts && layer.has_dsinks;
    for (const RingBatch& batch : some.batches)
      some.calls.push_back(plan.plan_call(batch, sub, plan.rows(), nullptr));
  }
  sub.has_dsinks = sub.has_sinks = false;  // lse has them
  plan.plan_steps(sub, gradients);
  const int64_t heads = plan.batch * layer.heads;
  const int64_t kv = plan.batch * layer.heads_kv * (layer.head_dim + layer.head_dim_v);
  const int64_t row = heads * layer.head_dim + kv;  // (batch * heads * head_dim, and K's and V's)
  plan.sums_bytes = static_cast<size_t>(4 * plan.room.size() * row);
  plan.sums = plan.take(static_cast<int64_t>(plan.sums_bytes));
  plan.dsinks = plan.take(layer.has_dsinks ? layer.heads * 4 : 0);
  plan.lse_part = plan.take(plan.most_queries * heads * 4);
  plan.dlse_part = plan.take(layer.has_dlse ? plan.most_queries * heads * 4 : 0);
  plan.computed_bytes = 4 * plan.most_received * kv;
  plan.computed = plan.take(2 * plan.computed_bytes);  // being computed, and on its way
  plan.returned = plan.take(4 * plan.most_sent * kv);
  plan.take_messages();
  plan.finish_workspace();
}

// The lse of all keys is there, so that a step needs nothing of the others. dK and dV of somebody
// else's keys are computed in float32 and sent home, where they are added up in float32, in the
// order of the steps, in a room for rows that have such sums. What is final is no sum.
class RingBackward : RingLaunch<BackwardArgs> {
 public:
  RingBackward(const RingPlan& plan, const BackwardArgs& args, Communicator& ranks)
      : RingLaunch(plan, args, ranks), lse_(lse(args.lse)), dlse_(lse(args.dlse)) {
    out_ = tensor(args.out, layer_.heads, layer_.head_dim_v,
                  layer_.out_dtype == DType::kSame ? layer_.dtype : layer_.out_dtype, layer_.out);
    dout_ = tensor(args.dout, layer_.heads, layer_.head_dim_v, layer_.dtype, layer_.dout);
    dq_ = partial(place(plan.sums), layer_.heads, layer_.head_dim);
    sums_ = pair(plan.sums + dq_.bytes(), plan.room.size(), DType::kFloat32);
  }

  void run() {
    upload_numbers();
    const RingMemory& memory = plan_.memory;
    if (layer_.has_dsinks) {
      memory.clear(args_.dsinks, RingLse::bytes(layer_.heads), args_.stream);
    }
    ask(0);
    const RingPair final = {
        tensor(args_.dk, layer_.heads_kv, layer_.head_dim, grad_dtype(), layer_.dk),
        tensor(args_.dv, layer_.heads_kv, layer_.head_dim_v, grad_dtype(), layer_.dv)};
    const RingTensor dq = tensor(args_.dq, layer_.heads, layer_.head_dim, grad_dtype(), layer_.dq);
    memory.clear(place(plan_.sums), plan_.sums_bytes, args_.stream);
    for (const RingCall& call : plan_.edges) add_own(call);
    for (const RingCall& call : plan_.own) add_own(call);
    for (const RingCall& call : plan_.final) write(call, dq, final);
    const std::vector<RingStep>& steps = plan_.schedule.steps;
    for (size_t n = 0; n < steps.size(); ++n) {
      next(n);
      const RingPair got = received(n);
      const RingPair computed =
          pair(plan_.computed + n % 2 * static_cast<size_t>(plan_.computed_bytes), got.k.rows,
               DType::kFloat32);
      memory.clear(computed.k.data, computed.k.bytes() + computed.v.bytes(), args_.stream);
      for (const RingCall& call : plan_.steps[n]) add_to(call, got.k, got.v, computed, call.k);
      if (n > 0) take(steps[n - 1]);
      give(steps[n], computed);
    }
    for (const RingCall& call : plan_.own_last) add_own(call);
    // What it writes to rows of sums, and to those between its blocks, is written over.
    for (const RingCall& call : plan_.final_last) write(call, dq, final);
    if (!steps.empty()) take(steps.back());
    const RingRoom& room = plan_.room;
    for (const RingRows& rows : plan_.summed_q)
      add_rows(dq_.part(room.place(rows)), dq.part(rows), grad_dtype(), false);
    for (const RingRows& rows : plan_.summed_k) {
      add_rows(sums_.k.part(room.place(rows)), final.k.part(rows), grad_dtype(), false);
      add_rows(sums_.v.part(room.place(rows)), final.v.part(rows), grad_dtype(), false);
    }
  }

 private:
  [[nodiscard]] DType grad_dtype() const {
    return layer_.grad_dtype == DType::kSame ? layer_.dtype : layer_.grad_dtype;
  }
  // of_k: where dk and dv of the call's keys stand in those of `gradients`.
  void add_to(const RingCall& call, const RingTensor& k, const RingTensor& v,
              const RingPair& gradients, const RingRows& of_k) const {
    compute(call, k, v, dq_.part(plan_.room.place(call.q)), gradients, of_k, args_.dsinks);
  }
  void add_own(const RingCall& call) const {
    add_to(call, k_, v_, sums_, plan_.room.place(call.k));
  }
  // A call that does not add to gradients writes that of the sinks, too: it is added here.
  void write(const RingCall& call, const RingTensor& dq, const RingPair& gradients) const {
    compute(call, k_, v_, dq.part(call.q), gradients, call.k, floats(plan_.dsinks));
    if (!call.dsinks) return;
    const auto of = [&](void* data) {
      return RingTensor::of(data, 1, 1, layer_.heads, 1, DType::kFloat32);
    };
    add_rows(of(floats(plan_.dsinks)), of(args_.dsinks), DType::kFloat32, true);
  }
  void compute(const RingCall& call, const RingTensor& k, const RingTensor& v, const RingTensor& dq,
               const RingPair& gradients, const RingRows& of_k, float* dsinks) const {
    BackwardArgs a = call_args(call, k, v);
    a.out = out_.part(call.q).data;
    a.dout = dout_.part(call.q).data;
    a.lse = lse_.part(call.q, floats(plan_.lse_part), plan_.memory, args_.stream);
    a.dlse = dlse_.part(call.q, floats(plan_.dlse_part), plan_.memory, args_.stream);
    a.dq = dq.data;
    a.dk = gradients.k.part(of_k).data;
    a.dv = gradients.v.part(of_k).data;
    // The sinks are in lse; they themselves matter for their gradient alone.
    if (call.sinks) a.sinks = args_.sinks;
    if (call.dsinks) a.dsinks = dsinks;
    call.plan.backward(a);
  }
  // Sends dK and dV home, and asks for those of the rank's own keys.
  void give(const RingStep& step, const RingPair& computed) const {
    const RingPair mine = returned(step);
    const std::array<RingMessage, 2> sends = {
        RingMessage{computed.k.data, computed.k.bytes(), step.source},
        RingMessage{computed.v.data, computed.v.bytes(), step.source}};
    const std::array<RingMessage, 2> receives = {
        RingMessage{mine.k.data, mine.k.bytes(), step.target},
        RingMessage{mine.v.data, mine.v.bytes(), step.target}};
    begin(kGradients, sends, receives);
  }
  void take(const RingStep& step) const {
    if (!travels(step)) return;
    ranks_.end(kGradients, args_.stream);
    const RingPair mine = returned(step);
    int64_t row = 0;
    for (const RingRows& rows : step.sends) {
      const RingRows part = {row, row + rows.size()};
      const RingRows sum = plan_.room.place(rows);
      add_rows(mine.k.part(part), sums_.k.part(sum), DType::kFloat32, true);
      add_rows(mine.v.part(part), sums_.v.part(sum), DType::kFloat32, true);
      row = part.end;
    }
  }
  [[nodiscard]] RingPair returned(const RingStep& step) const {
    return pair(plan_.returned, ring_count(step.sends), DType::kFloat32);
  }
  void add_rows(const RingTensor& x, const RingTensor& to, DType dtype, bool accumulate) const {
    AddArgs a = {.device = layer_.device, .device_index = layer_.device_index};
    a.out_dtype = dtype;
    a.threads = layer_.threads;
    a.accumulate = accumulate;
    a.batch = x.batch;
    a.seqlen = x.rows;
    a.heads = x.heads;
    a.head_dim = x.dim;
    a.x = reinterpret_cast<const float*>(x.data);
    a.out = to.data;
    a.x_strides = x.strides;
    a.out_strides = to.strides;
    a.stream = args_.stream;
    strobe::add(a);
  }

  RingLse lse_, dlse_;
  RingTensor out_, dout_, dq_;
  RingPair sums_ = {};  // of dK and dV of the rank's own keys
};

}  // namespace internal
}  // namespace v0
}  // namespace strobe

#endif  // STROBE_RING_BACKWARD_HPP_
