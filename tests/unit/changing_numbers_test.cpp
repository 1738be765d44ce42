// Numbers of a launch (lengths, offsets, positions, indices, pages) that change while it runs, as
// in a serving loop that prepares its next step too early. Whatever they become, the launch reads
// and writes nothing outside its tensors, and ends. But for pages, it gives what the numbers say
// with which it began.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "environment.h"
#include "gtest/gtest.h"
#include "guarded.h"
#include "strobe/strobe.h"

namespace {

using strobe_test::Guarded;
using strobe_test::kSanitized;

// An array of a launch. Each of its numbers may be anything between two others, whatever the rest
// of the launch's numbers are.
struct Numbers {
  std::vector<int32_t> values, least, most;

  void Add(int64_t low, int64_t high) {
    values.push_back(static_cast<int32_t>(low + (high - low) * 3 / 4));
    least.push_back(static_cast<int32_t>(low));
    most.push_back(static_cast<int32_t>(high));
  }
  void Add(int64_t count, int64_t low, int64_t high) {
    for (int64_t n = 0; n < count; ++n) Add(low, high);
  }
  // Offsets of sequences of `length` rows, each of which may begin up to `slack` rows further on.
  void AddOffsets(int64_t batch, int64_t length, int64_t slack) {
    Add(0, 0);
    for (int64_t b = 1; b < batch; ++b) Add(b * length, b * length + slack);
    Add(batch * length, batch * length);
  }
  [[nodiscard]] const int32_t* data() const { return values.empty() ? nullptr : values.data(); }

  // While another thread may be reading.
  void Put(size_t i, int32_t x) {
    std::atomic_ref<int32_t>(values[i]).store(x, std::memory_order_relaxed);
  }
};

// One launch, and all that it needs.
class Launch {
 public:
  Launch(strobe_direction direction, strobe_dtype dtype) {
    strobe_problem_init(&p, sizeof p);
    p.direction = direction;
    p.dtype = dtype;
    p.heads = 8;
    p.heads_kv = 2;
    p.head_dim = 32;
    p.causal = 1;
  }

  strobe_problem p;
  Numbers cu_q, cu_k, used_q, used_k, position, prefix, entries, leftpad, cu_new, rotary, table;
  int64_t entries_k = 1, rows_k = 0, rows_new = 0;  // of k and v, and of the new ones

  [[nodiscard]] std::vector<Numbers*> all() {
    return {&cu_q,    &cu_k,    &used_q, &used_k, &position, &prefix,
            &entries, &leftpad, &cu_new, &rotary, &table};
  }

  // Makes the plan and the tensors. A backward launch gets what the forward one gives.
  void Prepare() {
    // New keys of several sequences go to one place: in one order, of one thread.
    p.threads = p.append == STROBE_APPEND_NONE ? 2 : 1;
    const int64_t rows_q = p.varlen ? p.total_q : p.batch * p.seqlen_q;
    const int64_t size = p.dtype == STROBE_FLOAT32 ? 4 : 2, angles = p.rotary_dim / 2;
    const int64_t query = p.heads * p.head_dim, key = p.heads_kv * p.head_dim;
    const int64_t all_k = entries_k * rows_k, written = p.direction == STROBE_BACKWARD ? 1 : 0;
    for (const int64_t n :
         {rows_q * query, rows_q * query * written, all_k * key, all_k * key, rows_new * key,
          rows_new * key, p.rotary_rows * angles, p.rotary_rows * angles}) {
      inputs_.emplace_back(n, size);
    }
    outputs_.emplace_back(rows_q * query, size);
    outputs_.emplace_back(rows_q * p.heads, 4);
    for (const int64_t n : {rows_q * query, all_k * key, all_k * key}) {
      outputs_.emplace_back(n * written, size);
    }
    uint32_t x = 1;
    for (Guarded& t : inputs_) {
      for (int64_t e = 0; e < t.elements(); ++e) {
        x = x * 1664525 + 1013904223;
        oracle::Store(size == 4 ? oracle::DType::kFloat32 : oracle::DType::kBFloat16, t.bytes(), e,
                      static_cast<float>(x >> 8) * 0x1p-23f - 1);
      }
    }
    for (Guarded& t : inputs_) t.Seal();
    for (Guarded& t : outputs_) t.Seal();
    plan_.struct_size = sizeof plan_;
    ASSERT_EQ(strobe_plan_make(&p, &plan_), STROBE_OK) << strobe_last_error();
    workspace_.resize(plan_.workspace_bytes + 64);
    if (p.direction == STROBE_FORWARD) return;
    strobe_problem forward = p;
    forward.direction = STROBE_FORWARD;
    strobe_plan plan;
    plan.struct_size = sizeof plan;
    ASSERT_EQ(strobe_plan_make(&forward, &plan), STROBE_OK) << strobe_last_error();
    const strobe_forward_args a = ForwardArgs();
    ASSERT_EQ(strobe_forward(&plan, &a), STROBE_OK) << strobe_last_error();
  }

  // With a workspace of the caller's, or the library's own.
  strobe_status Run(bool callers_workspace = false, int32_t (*interrupt)(void*) = nullptr,
                    void* data = nullptr) {
    const auto run = [&](auto launch, auto args) {
      args.interrupt = interrupt;
      args.interrupt_data = data;
      if (callers_workspace) {
        const auto at = reinterpret_cast<uintptr_t>(workspace_.data());
        args.workspace = workspace_.data() + (64 - at % 64) % 64;
        args.workspace_bytes = plan_.workspace_bytes;
      }
      return launch(&plan_, &args);
    };
    if (p.direction == STROBE_FORWARD) return run(strobe_forward, ForwardArgs());
    strobe_backward_args a = Args<strobe_backward_args>();
    a.dout = inputs_[1].bytes();
    a.dq = outputs_[2].bytes();
    a.dk = outputs_[3].bytes();
    a.dv = outputs_[4].bytes();
    return run(strobe_backward, a);
  }

  // All that a launch writes, the cache included.
  [[nodiscard]] std::string Results() {
    std::string bytes;
    const auto add = [&](Guarded& t) {
      bytes.append(t.bytes(), static_cast<size_t>(t.elements() * t.element_size()));
    };
    for (Guarded& t : outputs_) add(t);
    if (p.append != STROBE_APPEND_NONE) add(inputs_[2]), add(inputs_[3]);
    return bytes;
  }

  // "" if nothing was written beside a tensor, and there is a number in all places of out.
  [[nodiscard]] std::string Wrong() {
    std::string wrong;
    for (std::vector<Guarded>* tensors : {&inputs_, &outputs_}) {
      for (size_t n = 0; n < tensors->size(); ++n) {
        wrong += (*tensors)[n].CheckZones("tensor " + std::to_string(n));
      }
    }
    const auto type =
        p.dtype == STROBE_FLOAT32 ? oracle::DType::kFloat32 : oracle::DType::kBFloat16;
    for (int64_t e = 0; e < outputs_[0].elements(); ++e) {
      const float x = oracle::Load(type, outputs_[0].bytes(), e);
      if (!std::isfinite(x)) return wrong + "out is not finite at " + std::to_string(e);
    }
    return wrong;
  }

 private:
  template <typename A>
  A Args() {
    A a{};
    a.struct_size = sizeof a;
    a.q = inputs_[0].bytes();
    a.k = inputs_[2].bytes();
    a.v = inputs_[3].bytes();
    a.out = outputs_[0].bytes();
    a.lse = reinterpret_cast<float*>(outputs_[1].bytes());
    a.cu_seqlens_q = cu_q.data();
    a.cu_seqlens_k = cu_k.data();
    a.seqused_q = used_q.data();
    a.seqused_k = used_k.data();
    a.q_position = position.data();
    a.prefix = prefix.data();
    return a;
  }
  strobe_forward_args ForwardArgs() {
    strobe_forward_args a = Args<strobe_forward_args>();
    a.block_table = table.data();
    a.cache_batch_idx = entries.data();
    a.leftpad = leftpad.data();
    if (p.append != STROBE_APPEND_NONE) {
      a.k_new = inputs_[4].bytes();
      a.v_new = inputs_[5].bytes();
    }
    a.cu_seqlens_k_new = cu_new.data();
    if (p.rotary_dim > 0) {
      a.rotary_cos = inputs_[6].bytes();
      a.rotary_sin = inputs_[7].bytes();
    }
    a.rotary_position = rotary.data();
    return a;
  }

  strobe_plan plan_;
  std::vector<Guarded> inputs_;   // q, dout, k, v, k_new, v_new, rotary_cos, rotary_sin
  std::vector<Guarded> outputs_;  // out, lse, dq, dk, dv
  std::vector<std::byte> workspace_;
};

// How large a launch is: its batch, and what its usual lengths are multiplied by.
struct Size {
  int64_t batch, factor;
};

// Packed sequences, of which a part is in use.
Launch Packed(strobe_direction direction, strobe_dtype dtype, int64_t queries, Size size) {
  Launch l(direction, dtype);
  const int64_t batch = size.batch, keys = 500 * size.factor;
  const int64_t slack_q = queries / 3, slack_k = keys / 5;
  if (queries < 20) l.p.heads = 64;  // more work with as many bytes
  l.p.batch = batch;
  l.p.varlen = 1;
  l.p.seqlen_q = queries + slack_q;
  l.p.seqlen_k = keys + slack_k;
  l.p.total_q = batch * queries;
  l.p.total_k = l.rows_k = batch * keys;
  l.p.has_seqused_q = l.p.has_seqused_k = l.p.has_q_position = l.p.has_prefix = 1;
  l.cu_q.AddOffsets(batch, queries, slack_q);
  l.cu_k.AddOffsets(batch, keys, slack_k);
  l.used_q.Add(batch, 0, queries - slack_q);
  l.used_k.Add(batch, 0, keys - slack_k);
  l.position.Add(batch, -100, 500);
  l.prefix.Add(batch, 0, keys - slack_k);
  return l;
}

// Packed sequences whose bound is far above their lengths: blocks and turns are then counted by
// rows (cpu/blocks.h).
Launch FarBound(strobe_direction direction, strobe_dtype dtype, int64_t batch) {
  Launch l(direction, dtype);
  const int64_t length = 40, slack = 30;
  l.p.batch = batch;
  l.p.varlen = 1;
  l.p.seqlen_q = l.p.seqlen_k = l.p.total_q = l.p.total_k = l.rows_k = batch * length;
  l.cu_q.AddOffsets(batch, length, slack);
  l.cu_k.AddOffsets(batch, length, slack);
  return l;
}

// Dense sequences, of which a part is in use.
Launch Dense(strobe_direction direction, strobe_dtype dtype, int64_t queries, Size size) {
  Launch l(direction, dtype);
  const int64_t batch = size.batch;
  if (queries < 20) l.p.heads = 64;
  l.p.batch = l.entries_k = batch;
  l.p.seqlen_q = queries;
  l.p.seqlen_k = l.rows_k = 700 * size.factor;
  l.p.has_seqused_q = l.p.has_seqused_k = 1;
  l.used_q.Add(batch, 0, queries);
  l.used_k.Add(batch, 0, l.p.seqlen_k);
  return l;
}

// A contiguous cache, with every array that a launch on it may carry. Some of its sequences have so
// few queries that they are decoded (cpu/decode.h), others not.
Launch Contiguous(strobe_dtype dtype, int64_t batch) {
  Launch l(STROBE_FORWARD, dtype);
  const int64_t queries = 11, fresh = 9, slack = 5;
  l.p.batch = batch;
  l.p.varlen = 1;
  l.p.seqlen_q = queries + slack;
  l.p.total_q = batch * queries;
  l.p.cache = STROBE_CACHE_CONTIGUOUS;
  l.p.cache_batch = l.entries_k = 7;
  l.p.seqlen_k = l.rows_k = 700;
  l.p.append = STROBE_APPEND_PACKED;
  l.p.seqlen_new = fresh + slack;
  l.p.total_new = l.rows_new = batch * fresh;
  l.p.rotary_dim = 16;
  l.p.rotary_rows = 800;
  l.p.has_seqused_k = l.p.has_cache_batch_idx = l.p.has_leftpad = l.p.has_rotary_position = 1;
  l.cu_q.AddOffsets(batch, queries, slack);
  l.cu_new.AddOffsets(batch, fresh, slack);
  l.entries.Add(batch, 0, l.entries_k - 1);
  l.leftpad.Add(batch, 0, 100);
  l.used_k.Add(batch, 100, l.p.seqlen_k - l.p.seqlen_new);
  l.rotary.Add(batch, 0, l.p.rotary_rows - l.p.seqlen_q);
  return l;
}

// A paged one. A sequence of many queries has as many new keys.
Launch Paged(strobe_dtype dtype, int64_t queries, int64_t batch) {
  Launch l(STROBE_FORWARD, dtype);
  l.p.batch = batch;
  l.p.seqlen_q = queries;
  l.p.cache = STROBE_CACHE_PAGED;
  l.p.pages = l.entries_k = 40;
  l.p.page_size = l.rows_k = 24;
  l.p.pages_per_sequence = 30;
  l.p.seqlen_k = 720;
  if (queries > 20) {
    l.p.append = STROBE_APPEND_DENSE;
    l.p.seqlen_new = queries;
    l.rows_new = batch * queries;
  }
  l.p.rotary_dim = 32;
  l.p.rotary_rows = 720;
  l.p.has_seqused_k = 1;
  l.used_k.Add(batch, 0, l.p.seqlen_k - queries);
  l.table.Add(batch * l.p.pages_per_sequence, 0, l.p.pages - 1);
  return l;
}

struct Kind {
  const char* name;
  bool takes_long;  // in a batch of moderate size
  std::function<Launch(strobe_dtype, Size)> make;
};
constexpr auto kForward = STROBE_FORWARD, kBackward = STROBE_BACKWARD;
const Kind kKinds[] = {
    {"packed", true, [](auto t, Size n) { return Packed(kForward, t, 150 * n.factor, n); }},
    {"packed, few queries", true, [](auto t, Size n) { return Packed(kForward, t, 12, n); }},
    {"packed, backward", true,
     [](auto t, Size n) { return Packed(kBackward, t, 150 * n.factor, n); }},
    {"far bound", false, [](auto t, Size n) { return FarBound(kForward, t, n.batch); }},
    {"far bound, backward", false, [](auto t, Size n) { return FarBound(kBackward, t, n.batch); }},
    {"dense", true, [](auto t, Size n) { return Dense(kForward, t, 150 * n.factor, n); }},
    {"dense, few queries", true, [](auto t, Size n) { return Dense(kForward, t, 8, n); }},
    {"dense, backward", true,
     [](auto t, Size n) { return Dense(kBackward, t, 150 * n.factor, n); }},
    {"contiguous cache", true, [](auto t, Size n) { return Contiguous(t, n.batch); }},
    {"pages, few queries", true, [](auto t, Size n) { return Paged(t, 8, n.batch); }},
    {"pages, a chunk of a prompt", true, [](auto t, Size n) { return Paged(t, 90, n.batch); }},
};
constexpr strobe_dtype kDTypes[] = {STROBE_FLOAT32, STROBE_BFLOAT16};

// Changes the table, or all other numbers, when the launch asks whether to go on: in its midst.
struct Change {
  Launch* launch;
  bool pages;
  int32_t number;
  int asked = 0;

  static int32_t Answer(void* data) {
    auto& self = *static_cast<Change*>(data);
    if (self.asked++ > 0) return 0;
    for (Numbers* numbers : self.launch->all()) {
      if ((numbers == &self.launch->table) != self.pages) continue;
      for (size_t i = 0; i < numbers->values.size(); ++i) numbers->Put(i, self.number);
    }
    return 0;
  }
};

// A launch that is asked: it takes more than a tenth of a second. It has run.
Launch LongLaunch(const Kind& kind) {
  const strobe_dtype dtype = kDTypes[(&kind - kKinds) % 2];
  for (Size size = kSanitized ? Size{4, 1} : Size{8, 6};; size.batch *= 2) {
    Launch l = kind.make(dtype, size);
    l.Prepare();
    int asked = 0;
    const auto count = [](void* data) -> int32_t { return ++*static_cast<int*>(data), 0; };
    EXPECT_EQ(l.Run(false, count, &asked), STROBE_OK) << strobe_last_error();
    if (asked > 1 || testing::Test::HasFailure()) return l;
  }
}

TEST(ChangingNumbers, NobodyAsksForThemOnceTheLaunchRuns) {
  int asked = 0;
  for (const Kind& kind : kKinds) {
    if (!kind.takes_long) continue;
    SCOPED_TRACE(kind.name);
    Launch l = LongLaunch(kind);
    const std::string wanted = l.Results();
    std::vector<Numbers> before;
    for (const Numbers* numbers : l.all()) before.push_back(*numbers);
    for (const int32_t number : {0, INT32_MAX, INT32_MIN}) {
      Change change{&l, false, number};
      ASSERT_EQ(l.Run(number == 0, Change::Answer, &change), STROBE_OK) << strobe_last_error();
      asked += change.asked;
      EXPECT_TRUE(l.Results() == wanted) << number;
      for (size_t n = 0; n < before.size(); ++n) *l.all()[n] = before[n];
    }
    ASSERT_EQ(l.Wrong(), "");
  }
  EXPECT_GT(asked, 0);
}

TEST(ChangingNumbers, APageThatIsGoneIsNeitherReadNorWritten) {
  int asked = 0;
  for (const Kind& kind : kKinds) {
    if (kind.make(STROBE_FLOAT32, {1, 1}).p.cache != STROBE_CACHE_PAGED) continue;
    SCOPED_TRACE(kind.name);
    Launch l = LongLaunch(kind);
    const Numbers before = l.table;
    for (const int64_t number : {l.p.pages, int64_t{-1}, int64_t{INT32_MAX}, int64_t{INT32_MIN}}) {
      Change change{&l, true, static_cast<int32_t>(number)};
      ASSERT_EQ(l.Run(false, Change::Answer, &change), STROBE_OK) << strobe_last_error();
      asked += change.asked;
      ASSERT_EQ(l.Wrong(), "") << number;
      l.table = before;
    }
  }
  EXPECT_GT(asked, 0);
}

// Another thread writes numbers all the time: such as are in range, or any.
TEST(ChangingNumbers, AnotherThreadMayWriteThem) {
  for (const bool in_range : {true, false}) {
    for (const strobe_dtype dtype : kDTypes) {
      for (const Kind& kind : kKinds) {
        SCOPED_TRACE(kind.name);
        Launch l = kind.make(dtype, {9, 1});
        l.Prepare();
        std::atomic<bool> stop{false};
        std::thread writer([&] {
          std::mt19937 random(1);
          while (!stop.load(std::memory_order_relaxed)) {
            for (Numbers* numbers : l.all()) {
              for (size_t i = 0; i < numbers->values.size(); ++i) {
                const int64_t low = numbers->least[i], high = numbers->most[i];
                int64_t x = low + static_cast<int64_t>(random() % (high - low + 1));
                // A few that are wrong: else every launch would be refused.
                if (!in_range && random() % 1024 == 0) x = static_cast<int32_t>(random());
                numbers->Put(i, static_cast<int32_t>(x));
              }
            }
          }
        });
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
        int ran = 0;
        bool good = true;
        for (int n = 0; good && (n < 3 || std::chrono::steady_clock::now() < end); ++n) {
          const strobe_status status = l.Run(n % 2 != 0);
          ran += status == STROBE_OK;
          good = status == STROBE_OK || (!in_range && status == STROBE_INVALID_ARGUMENT);
        }
        stop.store(true, std::memory_order_relaxed);
        writer.join();
        ASSERT_TRUE(good) << strobe_last_error();
        if (ran > 0) {
          ASSERT_EQ(l.Wrong(), "");
        }
      }
    }
  }
}

}  // namespace
