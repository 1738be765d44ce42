// Attention over a KV cache through the library's own checks, masks and index maps (core/cache.h),
// and row by row the oracle's arithmetic: what the fixtures are tested with, and what holds those
// maps against the oracle's, which shares nothing with them. With a defect on demand, to show that
// the fixtures see it.
#ifndef STROBE_TESTS_CACHE_PLAIN_H_
#define STROBE_TESTS_CACHE_PLAIN_H_

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/problem.h"
#include "numeric.h"
#include "oracle.h"

namespace strobe_test {

enum class CacheDefect {
  kNone,
  kPageAfter,      // keys of another page
  kNoLeftpad,      // keys from row 0 on
  kKeyMore,        // reads a row behind the last key
  kAppendsLater,   // new keys one row behind their place
  kAppendsPast,    // one row more than there are new keys
  kForgetsAppend,  // attends to the old keys alone
  kQueriesStay,    // queries are all turned as the first one
  kQueriesMove,    // queries are turned one by one without a mask, too
  kKeysNotTurned,  // new keys stored as they came
  kOtherPairs,     // interleaved and halves exchanged
  kNextEntry,      // of a contiguous cache
  kCount
};

class PlainCache {
 public:
  PlainCache(const strobe_problem& problem, const strobe_forward_args& args, CacheDefect defect)
      : p_(problem), a_(args), all_(strobe::cached_sequences_of(problem, args)), defect_(defect) {}

  void Run() {
    for (int64_t b = 0; b < p_.batch; ++b) Append(all_.sequence_of_all_heads(b));
    for (int64_t b = 0; b < p_.batch; ++b) Attend(all_.sequence_of_all_heads(b));
    if (!p_.varlen) return;
    strobe::CachedSequence nobody{};  // the rows past the end of the last
    nobody.q_row = nobody.lse_row = a_.cu_seqlens_q[p_.batch];
    nobody.rows_q = p_.total_q - nobody.q_row;
    Attend(nobody);
  }

 private:
  static oracle::DType Type(int32_t dtype) {
    return dtype == STROBE_FLOAT32    ? oracle::DType::kFloat32
           : dtype == STROBE_BFLOAT16 ? oracle::DType::kBFloat16
                                      : oracle::DType::kFloat16;
  }
  bool Is(CacheDefect defect) const { return defect_ == defect; }
  double Load(const void* data, int64_t index) const {
    return oracle::Load(Type(p_.dtype), data, index);
  }

  int64_t Offset(const strobe::CachedSequence& s, int64_t key, const strobe_strides& t) const {
    strobe::KeyRows keys = s.keys;
    if (Is(CacheDefect::kNoLeftpad)) keys.first = 0;
    strobe::KeyRows::Place place = keys.place(key);
    if (Is(CacheDefect::kPageAfter) && keys.pages) place.entry = (place.entry + 1) % p_.pages;
    if (Is(CacheDefect::kNextEntry) && !keys.pages)
      place.entry = (place.entry + 1) % p_.cache_batch;
    if (!place.there) place.entry = 0;  // a defect may look at columns without keys
    return place.offset(t.batch, t.seqlen);
  }

  void Turn(std::vector<double>& x, int64_t position) const {
    const int64_t pairs = p_.rotary_dim / 2;
    oracle::Tensor cosines(1, 1, pairs), sines(1, 1, pairs);
    for (int64_t n = 0; n < pairs; ++n) {
      cosines.at(0, 0)[n] = Load(a_.rotary_cos, position * pairs + n);
      sines.at(0, 0)[n] = Load(a_.rotary_sin, position * pairs + n);
    }
    const bool interleaved = (p_.rotary_interleaved != 0) != Is(CacheDefect::kOtherPairs);
    x = oracle::Rotate(x.data(), p_.head_dim, cosines, sines, 0, interleaved);
  }

  std::vector<double> Row(const void* data, int64_t at, int64_t dim) const {
    std::vector<double> x;
    for (int64_t d = 0; d < dim; ++d) x.push_back(Load(data, at + d));
    return x;
  }

  void Append(const strobe::CachedSequence& s) const {
    const int64_t more = Is(CacheDefect::kAppendsPast) ? 1 : 0;
    const int64_t later = Is(CacheDefect::kAppendsLater) ? 1 : 0;
    for (int64_t key = s.new_begin; key < s.mask.seqlen_k + more; ++key) {
      if (s.mask.seqlen_k == s.new_begin) break;
      const int64_t to = std::min(key + later, p_.seqlen_k - 1 - s.keys.first);
      const int64_t i = std::min(key, s.mask.seqlen_k - 1) - s.new_begin;
      for (int64_t h = 0; h < p_.heads_kv; ++h) {
        const auto from = [&](const strobe_strides& t) {
          return (p_.append == STROBE_APPEND_PACKED ? 0 : s.new_entry * t.batch) +
                 (s.new_row + i) * t.seqlen + h * t.head;
        };
        std::vector<double> x = Row(a_.k_new, from(p_.k_new), p_.head_dim);
        if (!Is(CacheDefect::kKeysNotTurned)) Turn(x, s.rotary_start + i);
        Store(const_cast<void*>(a_.k), p_.dtype, Offset(s, to, p_.k) + h * p_.k.head, x);
        Store(const_cast<void*>(a_.v), p_.dtype, Offset(s, to, p_.v) + h * p_.v.head,
              Row(a_.v_new, from(p_.v_new), p_.head_dim_v));
      }
    }
  }

  static void Store(void* data, int32_t dtype, int64_t at, const std::vector<double>& x) {
    for (size_t d = 0; d < x.size(); ++d) {
      oracle::Store(Type(dtype), data, at + static_cast<int64_t>(d), static_cast<float>(x[d]));
    }
  }

  void Attend(const strobe::CachedSequence& s) const {
    for (int64_t i = 0; i < s.rows_q; ++i) {
      for (int64_t h = 0; h < p_.heads; ++h) AttendRow(s, i, h);
    }
  }

  void AttendRow(const strobe::CachedSequence& s, int64_t i, int64_t h) const {
    const auto at = [&](const strobe_strides& t) {
      return (p_.varlen ? 0 : s.batch * t.batch) + (s.q_row + i) * t.seqlen + h * t.head;
    };
    const int64_t head_kv = h / (p_.heads / p_.heads_kv);
    strobe::Range keys = i < s.mask.seqlen_q ? s.mask.row(i) : strobe::Range{0, 0};
    if (Is(CacheDefect::kForgetsAppend)) keys.end = std::min(keys.end, s.new_begin);
    if (Is(CacheDefect::kKeyMore) && !keys.empty() && s.keys.first + keys.end < p_.seqlen_k)
      ++keys.end;
    // One query over the keys that the library's mask names, wherever its maps say that they are.
    const int64_t count = keys.empty() ? 0 : keys.size();
    oracle::Problem row;
    row.sequences = {{0, 1, 0, count}};
    row.sequences[0].q_position = s.mask.position(i) - keys.begin;
    row.head_dim = p_.head_dim;
    row.head_dim_v = p_.head_dim_v;
    row.scale = static_cast<double>(p_.scale);
    row.softcap = static_cast<double>(p_.softcap);
    if (p_.alibi) {
      const int64_t slope = p_.alibi == STROBE_ALIBI_PER_HEAD ? h : s.batch * p_.heads + h;
      row.slopes = {static_cast<double>(a_.alibi_slopes[slope])};
    }
    if (p_.has_sinks && i < s.mask.seqlen_q) row.sinks = {static_cast<double>(a_.sinks[h])};
    row.sinks_outside_lse = p_.sinks_outside_lse != 0;
    oracle::Tensor q(1, 1, p_.head_dim), k(count, 1, p_.head_dim), v(count, 1, p_.head_dim_v);
    if (count > 0) {
      q.data = Row(a_.q, at(p_.q), p_.head_dim);
      int64_t position = all_.query_rotation(s.rotary_start, i);
      if (Is(CacheDefect::kQueriesStay)) position = s.rotary_start;
      if (Is(CacheDefect::kQueriesMove))
        position = std::min(s.rotary_start + i, p_.rotary_rows - 1);
      if (p_.rotary_dim) Turn(q.data, position);
    }
    for (int64_t j = 0; j < count; ++j) {
      const int64_t key = keys.begin + j;
      const auto x = Row(a_.k, Offset(s, key, p_.k) + head_kv * p_.k.head, p_.head_dim);
      const auto y = Row(a_.v, Offset(s, key, p_.v) + head_kv * p_.v.head, p_.head_dim_v);
      std::copy(x.begin(), x.end(), k.at(j, 0));
      std::copy(y.begin(), y.end(), v.at(j, 0));
    }
    const oracle::ForwardResult found = oracle::Forward(row, q, k, v);
    const std::vector<double>& out = found.out.data;
    const double lse = found.lse.data[0];
    Store(a_.out, p_.out_dtype, at(p_.out), out);
    if (a_.lse) a_.lse[s.lse_row + i + h * all_.lse_head_stride] = static_cast<float>(lse);
  }

  const strobe_problem& p_;
  const strobe_forward_args& a_;
  const strobe::CachedSequences all_;
  const CacheDefect defect_;
};

/// A CacheFixture::Launch.
inline auto PlainLaunch(CacheDefect defect = CacheDefect::kNone) {
  return [defect](const strobe_problem& given, strobe_forward_args& args) {
    if (const strobe::Status s = strobe::check_problem(given); !s.ok()) {
      std::printf("%s\n", s.text().c_str());
      return s.code();
    }
    strobe_problem p = given;
    strobe::resolve_defaults(p);
    if (const strobe::Status s = strobe::check_args(p, 0, args); !s.ok()) {
      std::printf("%s\n", s.text().c_str());
      return s.code();
    }
    PlainCache(p, args, defect).Run();
    return STROBE_OK;
  };
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_CACHE_PLAIN_H_
