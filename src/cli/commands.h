// The commands of `strobe`, each a plain function of its options. main.cpp only reads the command
// line. Each returns the exit code and throws UserError or strobe::Error.
#ifndef STROBE_CLI_COMMANDS_H_
#define STROBE_CLI_COMMANDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <strobe/strobe.hpp>
#include <vector>

#include "cli/dtype.h"
#include "core/options.h"

namespace strobe::cli {

struct InfoOptions {
  bool json = false;
};

enum class Layout {
  kSeqlenHeads,
  kHeadsSeqlen
};  // [batch, seqlen, heads, head_dim] or [batch, heads, seqlen, head_dim]
enum class Which { kForward, kBackward, kBoth };

struct RunOptions {
  std::string input;
  std::string output;              // empty: none
  std::optional<Which> direction;  // unset: backward too when the file has dout
  std::optional<DType> dtype;      // unset: the file's
  Layout layout = Layout::kSeqlenHeads;
  Options problem;  // those of core/options.def that are flags
  int64_t seed = 0;
  int64_t offset = 0;
  bool alibi = false;
  bool out_float32 = false;         // out in float32 in place of the inputs' dtype
  bool rotary_interleaved = false;  // of rotary_cos and rotary_sin
  int64_t mask_block = 128;         // queries and keys of a block of the file's mask
  int64_t threads = 0;              // 0: unset
  Device device = Device::kCpu;
  int64_t device_index = 0;
  int64_t repeat = 0;  // 0: unset, for about half a second
  bool why = false;
};

struct CheckOptions {
  int64_t cases = 0;  // of each feature; 0: the default
  int64_t seed = 1;
  bool choices = false;            // each launch by one of the choices for its problem, in turns
  std::vector<DType> kv;           // what else a cache may hold; empty: random problems
  std::vector<std::string> files;  // with kv, as the next five; none: drawn numbers
  KvScale kv_scale = KvScale::kRow;
  std::optional<DType> dtype;  // unset: the file's
  Layout layout = Layout::kSeqlenHeads;
  Options problem;      // those of core/options.def that are flags
  int64_t threads = 0;  // 0: unset
  Device device = Device::kCpu;
  int64_t device_index = 0;
  bool json = false;
};

// Empty lists, zeros and what is unset stand for defaults, which --decode has of its own.
struct BenchOptions {
  bool decode = false;
  std::vector<DType> dtypes;
  std::vector<int64_t> head_dims;
  std::vector<int64_t> seqlens;
  std::vector<int64_t> seqlens_k;   // empty: as many keys as queries
  std::vector<int64_t> page_sizes;  // --decode alone; 0: contiguous
  std::optional<Layout> layout;     // --decode alone: of the cache
  std::vector<KvDTypes> kv;         // --decode alone: what its keys and values are
  std::vector<bool> causal;
  Options problem;  // those of core/options.def that are flags, but for causal
  std::optional<Which> direction;
  int64_t heads = 0;
  int64_t heads_kv = 0;   // 0: heads
  int64_t batch = 0;      // 0: max(1, 4096 / the longer of the two lengths)
  int64_t threads = 0;    // 0: unset
  int64_t ranks = 0;      // GPUs that sequences are split over; 0: unset
  int64_t documents = 0;  // with ranks: that a sequence is packed of; 0: it is one
  int64_t device_index = 0;
  Device device = Device::kCpu;
  double min_time = 0.3;  // seconds for each line and direction
  bool json = false;
};

struct TuneOptions {
  std::string input;   // what STROBE_RECORD wrote; empty: the set by default
  std::string output;  // empty: where the library looks for it
  double seconds = 120;
  bool check = false;   // show what the table in force gains, and write nothing
  int64_t threads = 0;  // 0: unset
  Device device = Device::kCpu;
  int64_t device_index = 0;
};

int Info(const InfoOptions& options);
int Run(const RunOptions& options);
int Check(const CheckOptions& options);
int Bench(const BenchOptions& options);
int Tune(const TuneOptions& options);
int CheckKv(const CheckOptions& options);      // what Check does with options.kv
int BenchDecode(const BenchOptions& options);  // what Bench does with options.decode
int BenchRanks(const BenchOptions& options);   // what Bench does with options.ranks

}  // namespace strobe::cli

#endif  // STROBE_CLI_COMMANDS_H_
