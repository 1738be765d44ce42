// Attention over a KV cache, naive and in float64, through the library's own checks and index maps
// (core/cache.h): what the fixtures are tested with, and what holds those maps against the oracle,
// which shares nothing with them. With a defect on demand, to show that the fixtures see it.
#ifndef STROBE_TESTS_CACHE_PLAIN_H_
#define STROBE_TESTS_CACHE_PLAIN_H_

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/problem.h"
#include "numeric.h"

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
    for (int64_t b = 0; b < p_.batch; ++b) Append(all_.sequence(b));
    for (int64_t b = 0; b < p_.batch; ++b) Attend(all_.sequence(b));
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
    const bool interleaved = (p_.rotary_interleaved != 0) != Is(CacheDefect::kOtherPairs);
    for (int64_t n = 0; n < pairs; ++n) {
      const double c = Load(a_.rotary_cos, position * pairs + n);
      const double s = Load(a_.rotary_sin, position * pairs + n);
      double& u = x[static_cast<size_t>(interleaved ? 2 * n : n)];
      double& w = x[static_cast<size_t>(interleaved ? 2 * n + 1 : n + pairs)];
      const double first = u * c - w * s, second = u * s + w * c;
      u = first;
      w = second;
    }
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
    std::vector<double> out(static_cast<size_t>(p_.head_dim_v), 0.0);
    double lse = -HUGE_VAL;
    strobe::Range keys = i < s.mask.seqlen_q ? s.mask.row(i) : strobe::Range{0, 0};
    if (Is(CacheDefect::kForgetsAppend)) keys.end = std::min(keys.end, s.new_begin);
    if (Is(CacheDefect::kKeyMore) && !keys.empty() && s.keys.first + keys.end < p_.seqlen_k)
      ++keys.end;
    if (!keys.empty()) {
      std::vector<double> x = Row(a_.q, at(p_.q), p_.head_dim);
      int64_t position = all_.query_rotation(s.rotary_start, i);
      if (Is(CacheDefect::kQueriesStay)) position = s.rotary_start;
      if (Is(CacheDefect::kQueriesMove))
        position = std::min(s.rotary_start + i, p_.rotary_rows - 1);
      if (p_.rotary_dim) Turn(x, position);
      std::vector<double> scores;
      for (int64_t j = keys.begin; j < keys.end; ++j) {
        const int64_t k = Offset(s, j, p_.k) + head_kv * p_.k.head;
        double score = 0;
        for (int64_t d = 0; d < p_.head_dim; ++d)
          score += x[static_cast<size_t>(d)] * Load(a_.k, k + d);
        score *= static_cast<double>(p_.scale);
        if (p_.softcap > 0) score = p_.softcap * std::tanh(score / p_.softcap);
        if (p_.alibi) {
          const int64_t slope = p_.alibi == STROBE_ALIBI_PER_HEAD ? h : s.batch * p_.heads + h;
          score -= a_.alibi_slopes[slope] * std::fabs(static_cast<double>(s.mask.position(i) - j));
        }
        scores.push_back(score);
      }
      const double largest = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (double& score : scores) sum += score = std::exp(score - largest);
      lse = largest + std::log(sum);
      for (int64_t j = keys.begin; j < keys.end; ++j) {
        const int64_t v = Offset(s, j, p_.v) + head_kv * p_.v.head;
        for (int64_t d = 0; d < p_.head_dim_v; ++d) {
          out[static_cast<size_t>(d)] +=
              scores[static_cast<size_t>(j - keys.begin)] / sum * Load(a_.v, v + d);
        }
      }
    }
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
