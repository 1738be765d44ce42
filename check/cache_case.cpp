#include "cache_case.h"

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Rng;

// A number of rows of at most `most`: often the ends.
int64_t Length(Rng& rng, int64_t most) {
  const double which = rng.Uniform();
  if (which < 0.12) return 0;
  if (which < 0.2) return std::min<int64_t>(1, most);
  if (which < 0.35) return most;
  return rng.Integer(0, most);
}

// Numbers that a column of the table may hold where the sequence has no key.
int32_t Garbage(Rng& rng) {
  const int32_t some[] = {-1, INT32_MIN, INT32_MAX, 1 << 20, 0};
  return rng.Pick(some);
}

void ChooseShapes(CacheCase& c, Rng& rng) {
  c.dtype = static_cast<DType>(rng.Integer(0, 2));
  c.out_dtype = rng.Chance(0.25) ? DType::kFloat32 : c.dtype;
  c.heads_kv = rng.Integer(1, 3);
  const int64_t groups[] = {1, 1, 2, 3, 4, 8};
  c.heads = c.heads_kv * rng.Pick(groups);
  const int64_t dims[] = {64, 128, 32, 80, 256};
  c.head_dim = rng.Chance(0.5) ? rng.Pick(dims) : rng.Integer(1, 80);
  c.head_dim_v = rng.Chance(0.7) ? c.head_dim : rng.Integer(1, 80);
  c.layout = static_cast<CacheLayout>(rng.Integer(0, 3));
  if (c.head_dim != c.head_dim_v && c.layout == CacheLayout::kInterleaved) {
    c.layout = CacheLayout::kHeadsFirst;
  }
}

// Mostly as an allocator gives it, or in units of 16 bytes; each tensor by itself.
Spacing DrawSpacing(Rng& rng) {
  Spacing s;
  if (rng.Chance(0.45)) return s;
  const int64_t unit = rng.Chance(0.5) ? 8 : 1;
  if (rng.Chance(0.4)) s.shift = unit * rng.Integer(1, 9);
  for (int64_t* const pad : {&s.pad_batch, &s.pad_row, &s.pad_head})
    if (rng.Chance(0.3)) *pad = unit * rng.Integer(1, 3);
  const int64_t odd[] = {1, 7, -3, 12};
  if (rng.Chance(0.3)) s.odd_stride = rng.Pick(odd);
  return s;
}

void ChooseSpacings(CacheCase& c, Rng& rng) {
  for (Spacing* const s : {&c.q, &c.k, &c.v, &c.k_new, &c.v_new, &c.out}) *s = DrawSpacing(rng);
  for (Spacing* const s : {&c.q, &c.k_new, &c.v_new, &c.out}) s->heads_first = rng.Chance(0.25);
  for (int64_t* const shift : {&c.shift_lse, &c.shift_cos, &c.shift_sin})
    if (rng.Chance(0.2)) *shift = rng.Integer(1, 9);
}

void ChooseMask(CacheCase& c, Rng& rng) {
  c.causal = rng.Chance(0.5);
  if (rng.Chance(0.15)) {
    c.with_prefix = true;
  } else {
    if (rng.Chance(0.25)) c.window_left = rng.Integer(0, 80);
    if (rng.Chance(0.15)) c.chunk = rng.Integer(1, 100);
  }
  if (rng.Chance(0.15)) c.window_right = rng.Integer(0, 40);
  c.with_q_position = rng.Chance(0.15);
  if (rng.Chance(0.2)) c.softcap = 15;
  if (rng.Chance(0.25)) c.alibi = static_cast<int32_t>(rng.Integer(1, 2));
  if (c.chunk == 0 && rng.Chance(0.1)) {  // a window that ends before a query's own position
    c.window_signed = true;
    c.window_right = -rng.Integer(1, 20);
    c.window_left =
        c.with_prefix || rng.Chance(0.3) ? STROBE_NO_LIMIT : rng.Integer(0, 60) - c.window_right;
  }
}

void ChooseQueries(CacheCase& c, Rng& rng, int64_t batch) {
  c.varlen = rng.Chance(0.5);
  c.with_used_q = rng.Chance(0.2);
  const int64_t most = rng.Chance(0.5) ? 1 : rng.Chance(0.5) ? 12 : 90;
  const int64_t dense = rng.Chance(0.7) ? most : rng.Integer(0, most);
  for (int64_t b = 0; b < batch; ++b) {
    CacheSequence s;
    s.queries = s.used_queries = c.varlen ? Length(rng, most) : dense;
    if (c.with_used_q) s.used_queries = Length(rng, s.queries);
    c.sequences.push_back(s);
  }
}

// How many rows each sequence has and gets.
void ChooseLengths(CacheCase& c, Rng& rng) {
  c.with_lengths = rng.Chance(0.9);
  if (c.with_lengths && rng.Chance(0.5)) {
    c.append = rng.Chance(0.5) ? STROBE_APPEND_DENSE : STROBE_APPEND_PACKED;
  }
  c.with_leftpad = rng.Chance(0.25);
  const int64_t most_added = std::min(c.most_rows, rng.Chance(0.6) ? int64_t{1} : int64_t{40});
  const int64_t dense = rng.Chance(0.1) ? 0 : most_added;
  for (CacheSequence& s : c.sequences) {
    if (c.append == STROBE_APPEND_DENSE) s.added = dense;
    if (c.append == STROBE_APPEND_PACKED) s.added = Length(rng, most_added);
    s.used = c.with_lengths ? Length(rng, c.most_rows - s.added) : c.most_rows;
    // At the border of a page, or one before it.
    if (c.paged && c.with_lengths && rng.Chance(0.4)) {
      const int64_t border = s.used / c.rows * c.rows - (rng.Chance(0.5) ? 1 : 0);
      if (border >= 0) s.used = border;
    }
    if (c.with_leftpad) s.leftpad = Length(rng, s.used);
    const int64_t keys = s.used - s.leftpad + s.added;
    s.q_position = rng.Integer(-s.used_queries - 10, keys + 10);
    s.prefix = rng.Integer(0, std::min(keys, c.most_rows));
  }
}

// Whom each row of the cache belongs to. Rows that somebody writes are that sequence's alone.
void ChoosePlaces(CacheCase& c, Rng& rng) {
  if (!c.paged) {
    c.with_entries = rng.Chance(0.5);
    c.entries = c.batch() + (rng.Chance(0.5) ? rng.Integer(0, 3) : 0);
    std::vector<int64_t> order(static_cast<size_t>(c.entries));
    std::iota(order.begin(), order.end(), 0);
    for (size_t n = order.size(); c.with_entries && n > 1; --n) {
      std::swap(order[n - 1],
                order[static_cast<size_t>(rng.Integer(0, static_cast<int64_t>(n) - 1))]);
    }
    for (size_t b = 0; b < c.sequences.size(); ++b) {
      const bool shared = c.with_entries && !c.append && b > 0 && rng.Chance(0.3);
      c.sequences[b].entry = shared ? c.sequences[b - 1].entry : order[b];
    }
    return;
  }
  c.table_stride = c.columns + (rng.Chance(0.3) ? rng.Integer(1, 5) : 0);
  c.entries = rng.Integer(0, 4);  // pages that nobody has; the others follow as they are needed
  for (size_t b = 0; b < c.sequences.size(); ++b) {
    CacheSequence& s = c.sequences[b];
    s.pages.resize(static_cast<size_t>(c.table_stride));
    for (int64_t n = 0; n < c.table_stride; ++n) {
      int32_t& page = s.pages[static_cast<size_t>(n)];
      const int64_t begin = n * c.rows, end = begin + c.rows;
      if (n >= c.columns || end <= s.leftpad || begin >= s.used + s.added ||
          s.leftpad == s.used + s.added) {
        page = Garbage(rng);
        continue;
      }
      // A prefix that two sequences share, or a page twice in one: as long as nobody writes it.
      const bool written = s.added > 0 && end > s.used;
      const CacheSequence& other =
          c.sequences[static_cast<size_t>(rng.Integer(0, static_cast<int64_t>(b)))];
      if (!written && rng.Chance(0.3) && &other != &s) {
        if (other.leftpad <= begin && end <= other.used) {  // all of it is read alone there too
          page = other.pages[static_cast<size_t>(n)];
          continue;
        }
      }
      if (!written && n > 0 && begin - c.rows >= s.leftpad && end <= s.used && rng.Chance(0.1)) {
        page = s.pages[static_cast<size_t>(n - 1)];
        continue;
      }
      page = static_cast<int32_t>(c.entries++);
    }
  }
  c.entries = std::max<int64_t>(c.entries, 1);
  std::vector<int32_t> order(static_cast<size_t>(c.entries));
  std::iota(order.begin(), order.end(), 0);
  for (size_t n = order.size(); n > 1; --n) {
    std::swap(order[n - 1],
              order[static_cast<size_t>(rng.Integer(0, static_cast<int64_t>(n) - 1))]);
  }
  for (CacheSequence& s : c.sequences) {
    for (int64_t n = s.leftpad / c.rows; n * c.rows < s.used + s.added; ++n) {
      if (s.leftpad == s.used + s.added) break;
      int32_t& page = s.pages[static_cast<size_t>(n)];
      page = order[static_cast<size_t>(page)];
    }
  }
}

void ChooseRotary(CacheCase& c, Rng& rng) {
  if (c.head_dim < 2 || rng.Chance(0.5)) return;
  c.rotary_dim = rng.Chance(0.5) ? c.head_dim / 2 * 2 : 2 * rng.Integer(1, c.head_dim / 2);
  c.interleaved = rng.Chance(0.5);
  c.with_rotary_position = rng.Chance(0.3);
  int64_t most = 1;
  for (CacheSequence& s : c.sequences) {
    s.rotary_position = c.with_rotary_position ? rng.Integer(0, 50) : s.used - s.leftpad;
    most = std::max(most, s.rotary_position + std::max(s.used_queries, s.added));
  }
  c.rotary_rows = most + (rng.Chance(0.5) ? rng.Integer(0, 20) : 0);
}

// masked: long enough for several blocks of a mask.
CacheCase Draw(uint64_t seed, bool masked) {
  Rng rng(seed * 0x9E3779B97F4A7C15u + 1);
  CacheCase c;
  c.seed = seed;
  ChooseShapes(c, rng);
  ChooseMask(c, rng);
  ChooseQueries(c, rng, rng.Integer(1, 5));
  c.paged = rng.Chance(0.6);
  int64_t longest = rng.Chance(0.05) ? 700 : rng.Chance(0.6) ? 60 : 200;
  if (masked) longest = 200 + 5 * longest / 2;
  if (c.paged) {
    const int64_t large[] = {64, 128, 256, 16};
    c.rows = rng.Chance(0.7) ? rng.Integer(1, 17) : rng.Pick(large);
    c.columns = rng.Integer(0, std::max<int64_t>(longest / c.rows, 2));
    c.most_rows = c.columns * c.rows;
    if (rng.Chance(0.3)) c.most_rows = rng.Integer(0, c.most_rows);
  } else {
    c.most_rows = c.rows = rng.Integer(0, longest);
  }
  ChooseLengths(c, rng);
  ChoosePlaces(c, rng);
  ChooseRotary(c, rng);
  c.with_lse = rng.Chance(0.8);
  c.batch_invariant = rng.Chance(0.3);
  c.threads = static_cast<int32_t>(rng.Integer(1, 4));
  ChooseSpacings(c, rng);
  if (c.varlen && rng.Chance(0.2)) c.past_q = rng.Integer(1, 70);
  if (c.append == STROBE_APPEND_PACKED && rng.Chance(0.2)) c.past_new = rng.Integer(1, 20);
  c.with_sinks = rng.Chance(0.25);
  c.sinks_outside_lse = c.with_sinks && rng.Chance(0.3);
  if (masked) c.mask = PickMaskChoice(rng, c.varlen);
  return c;
}

}  // namespace

int64_t CacheCase::queries() const {
  int64_t n = varlen ? past_q : 0;
  for (const CacheSequence& s : sequences) n += s.queries;
  return n;
}
int64_t CacheCase::added() const {
  int64_t n = 0;
  for (const CacheSequence& s : sequences) n += s.added;
  return n;
}
int64_t CacheCase::longest_queries() const {
  int64_t n = 0;
  for (const CacheSequence& s : sequences) n = std::max(n, s.queries);
  return n;
}
int64_t CacheCase::longest_added() const {
  int64_t n = 0;
  for (const CacheSequence& s : sequences) n = std::max(n, s.added);
  return n;
}
int64_t CacheCase::Entry(const CacheSequence& s, int64_t n) const {
  return paged ? s.pages[static_cast<size_t>(n / rows)] : s.entry;
}

CacheCase GenerateCacheCase(uint64_t seed) { return Draw(seed, false); }
CacheCase GenerateMaskedCacheCase(uint64_t seed) { return Draw(seed, true); }

CacheCase WithBias(CacheCase c) {
  Rng rng(c.seed ^ 0xB1A5ED5u);
  c.has_bias = true;
  c.bias = DrawBias(rng);
  c.bias_place = DrawSpacing(rng);
  static constexpr int64_t kSteps[] = {1, 1, 1, 1, 2, 3};
  c.bias.layout.dim_step = rng.Pick(kSteps);
  return c;
}

CacheCase GenerateBiasedCacheCase(uint64_t seed) {
  CacheCase c = WithBias(seed % 2 ? GenerateMaskedCacheCase(seed) : GenerateCacheCase(seed));
  c.batch_invariant = false;
  return c;
}

CacheCase GenerateQuantisedCase(uint64_t seed, bool masked) {
  CacheCase c = Draw(seed, masked);
  Rng rng(seed ^ 0x0A57E11A7E5u);
  using oracle::Form;
  const Form forms[] = {Form::kInt8, Form::kE4m3, Form::kQ8, Form::kQ4};
  c.form = rng.Pick(forms);
  if (oracle::HasScales(c.form)) {
    const int32_t kinds[] = {STROBE_KV_SCALE_ROW, STROBE_KV_SCALE_ROW, STROBE_KV_SCALE_HEAD,
                             STROBE_KV_SCALE_TENSOR};
    c.scale_kind = rng.Pick(kinds);
    c.scale_dtype = rng.Chance(0.5) ? DType::kFloat16 : DType::kFloat32;
    c.k_scale = DrawSpacing(rng);
    c.v_scale = DrawSpacing(rng);
  } else {
    for (int64_t* const dim : {&c.head_dim, &c.head_dim_v}) *dim = (*dim + 31) / 32 * 32;
  }
  c.hostile = rng.Chance(0.2);
  return c;
}

CacheCase GenerateMixedCacheCase(uint64_t seed) {
  using oracle::Form;
  // What scales are like is drawn there.
  CacheCase c = GenerateQuantisedCase(seed);
  Rng rng(seed ^ 0x2F0123C5u);
  const Form forms[] = {Form::kNone, Form::kInt8, Form::kE4m3, Form::kE5m2, Form::kQ8, Form::kQ4};
  c.form = rng.Pick(forms);
  do {
    c.form_v = rng.Pick(forms);
  } while (c.form_v == c.form);
  const bool scaled = oracle::HasScales(c.form) || oracle::HasScales(*c.form_v);
  if (!scaled) {
    c.scale_kind = STROBE_KV_SCALE_NONE;
    c.scale_dtype = DType::kFloat32;
  } else if (c.scale_kind == STROBE_KV_SCALE_NONE) {
    c.scale_kind = rng.Chance(0.6) ? STROBE_KV_SCALE_ROW : STROBE_KV_SCALE_HEAD;
    c.scale_dtype = rng.Chance(0.5) ? DType::kFloat16 : DType::kFloat32;
    c.k_scale = DrawSpacing(rng);
    c.v_scale = DrawSpacing(rng);
  }
  const auto has_blocks = [](Form form) { return form == Form::kQ8 || form == Form::kQ4; };
  if (has_blocks(c.form)) c.head_dim = (c.head_dim + 31) / 32 * 32;
  if (has_blocks(*c.form_v)) c.head_dim_v = (c.head_dim_v + 31) / 32 * 32;
  // Elements of two sizes have no pool in common.
  if (c.layout == CacheLayout::kInterleaved) c.layout = CacheLayout::kRowsFirst;
  return c;
}

CacheCase GenerateFloat8CacheCase(uint64_t seed, bool masked) {
  CacheCase c = masked ? GenerateMaskedCacheCase(seed) : GenerateCacheCase(seed);
  Rng rng(seed ^ 0xF10A7CACu);
  c.float8 = true;
  c.form = rng.Chance(0.65) ? oracle::Form::kE4m3 : oracle::Form::kE5m2;
  c.scale_kind = rng.Chance(0.8) ? STROBE_KV_SCALE_BATCH_HEAD : STROBE_KV_SCALE_NONE;
  c.with_q_scale = rng.Chance(0.75);
  c.k_scale = DrawSpacing(rng);
  c.v_scale = DrawSpacing(rng);
  c.hostile = rng.Chance(0.15);
  c.rotary_dim = c.rotary_rows = 0;  // no kernel rotates codes
  return c;
}

std::string ToString(const CacheCase& c) {
  std::ostringstream s;
  s << "seed " << c.seed << ": " << Name(c.dtype) << " -> " << Name(c.out_dtype) << ", heads "
    << c.heads << "/" << c.heads_kv << ", dims " << c.head_dim << "/" << c.head_dim_v << ", "
    << (c.paged ? "pages " : "entries ") << c.entries << " x " << c.rows << ", seqlen_k "
    << c.most_rows << ", layout " << static_cast<int>(c.layout) << ", append " << c.append
    << (c.varlen ? ", varlen" : "") << ", past the end " << c.past_q << "/" << c.past_new
    << (c.causal ? ", causal" : "") << ", window " << c.window_left << " " << c.window_right
    << (c.window_signed ? " signed" : "") << ", chunk " << c.chunk << ", softcap " << c.softcap
    << ", alibi " << c.alibi << (c.with_sinks ? ", sinks" : "")
    << (c.sinks_outside_lse ? " outside lse" : "") << ", rotary " << c.rotary_dim
    << (c.interleaved ? " interleaved" : "") << ", threads " << c.threads << ", cache of "
    << oracle::Name(c.form) << (c.form_v ? " and " : "")
    << (c.form_v ? oracle::Name(*c.form_v) : "") << ", scales " << c.scale_kind << " "
    << Name(c.scale_dtype) << (c.hostile ? " hostile" : "") << (c.float8 ? ", q float8" : "")
    << (c.with_q_scale ? " scaled" : "") << ToString(c.mask);
  if (c.has_bias) {
    const BiasCase& b = c.bias;
    s << ", bias " << Name(c.bias_dtype()) << (b.one_batch ? " of all sequences" : "")
      << (b.one_head ? " of all heads" : "") << (b.one_query ? " of all queries" : "") << ", size "
      << b.size << ", hides " << b.hides << ", step " << b.layout.dim_step << " +"
      << c.bias_place.shift << ", row pad " << c.bias_place.pad_row;
  }
  s << "\n ";
  const std::pair<const char*, const Spacing*> spacings[] = {
      {"q", &c.q},         {"k", &c.k},         {"v", &c.v},
      {"k_new", &c.k_new}, {"v_new", &c.v_new}, {"out", &c.out}};
  for (const auto& [name, of] : spacings) {
    s << " " << name << " +" << of->shift << " (" << (of->heads_first ? "heads first, " : "")
      << "pads " << of->pad_batch << " " << of->pad_row << " " << of->pad_head << ", odd "
      << of->odd_stride << ")";
  }
  s << "\n";
  for (const CacheSequence& q : c.sequences) {
    s << "  queries " << q.used_queries << " of " << q.queries << ", rows " << q.leftpad << " to "
      << q.used << " + " << q.added;
    if (c.with_q_position) s << ", position " << q.q_position;
    if (c.with_prefix) s << ", prefix " << q.prefix;
    if (c.rotary_dim) s << ", rotary position " << q.rotary_position;
    if (!c.paged) s << ", entry " << q.entry;
    s << "\n";
  }
  return s.str();
}

}  // namespace strobe_test
