// The tensors of a file from which `strobe run` packs a mask as data.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>

#include "cli/errors.h"
#include "cli/inputs.h"
#include "cli/text.h"

namespace strobe::cli {

// A tensor of the mask, whose last extents are these, -1 being any; null where the file has none.
// Those before them, [batch or 1, heads or 1] or packed [heads or 1], are alike in all tensors.
const TensorInfo* Inputs::TakeOfMask(const char* name, std::initializer_list<const char*> dtypes,
                                     const std::vector<int64_t>& last) {
  const TensorInfo* const info = Take(name);
  if (info == nullptr) return nullptr;
  const std::vector<int64_t>& shape = info->shape;
  const size_t before = varlen ? 1 : 2;
  bool good = std::find(dtypes.begin(), dtypes.end(), info->dtype) != dtypes.end() &&
              shape.size() == before + last.size();
  std::vector<std::string> wanted;
  const auto expect = [&](size_t at, int64_t own, int64_t all) {
    const std::string name_of_all = own != 0   ? fmt::format("{}", own)
                                    : all == 1 ? "1"
                                               : fmt::format("1 or {}", all);
    wanted.push_back(name_of_all);
    good = good && (own != 0 ? shape[at] == own : shape[at] == 1 || shape[at] == all);
  };
  if (!varlen) expect(0, mask.batch, q.batch);
  expect(before - 1, mask.heads, q.heads);
  for (size_t n = 0; n < last.size(); ++n) {
    wanted.push_back(last[n] < 0 ? "any" : fmt::format("{}", last[n]));
    good = good && (last[n] < 0 || shape[before + n] == last[n]);
  }
  if (!good) {
    // What some tensor of the mask has, the others have too.
    throw UserError(
        fmt::format("{} is {} {}, expected {} [{}]{}", name, info->dtype, ShapeText(shape),
                    fmt::join(dtypes, " or "), fmt::join(wanted, ", "),
                    mask.heads != 0 ? ": batch and heads as of the mask's others" : ""));
  }
  mask.batch = varlen ? Batch() : shape[0];
  mask.heads = shape[before - 1];
  return info;
}

void Inputs::ReadMask() {
  mask = {};
  const int64_t side = mask.block = options_.mask_block, rows = q.seqlen;
  const int64_t blocks = varlen ? rows / side + Batch() : (rows + side - 1) / side;
  const auto integers = [&](const TensorInfo* info) {
    return info != nullptr ? TakeIntegers(info->name, info->shape) : std::vector<int32_t>();
  };
  mask.keep = TakeOfMask("mask", {"BOOL", "U8"}, {rows, SeqlenK()});
  mask.intervals = integers(TakeOfMask("mask_intervals", {"I32"}, {rows, 4}));
  for (const auto& [kind, list] : {std::pair{"partial", &mask.partial}, {"full", &mask.full}}) {
    const std::string counts = fmt::format("mask_{}_counts", kind),
                      columns = fmt::format("mask_{}_blocks", kind);
    const TensorInfo* const of_counts = TakeOfMask(counts.c_str(), {"I32"}, {blocks});
    const TensorInfo* const of_blocks = TakeOfMask(columns.c_str(), {"I32"}, {blocks, -1});
    if ((of_counts == nullptr) != (of_blocks == nullptr))
      throw UserError(fmt::format("{} or {} without the other, expected both", counts, columns));
    list->counts = integers(of_counts);
    list->blocks = integers(of_blocks);
    list->columns = of_blocks != nullptr ? of_blocks->shape.back() : 0;
  }
  if (Find("mask_partial_bits") != nullptr && Find("mask_partial_blocks") == nullptr)
    throw UserError("mask_partial_bits without mask_partial_blocks, expected both");
  mask.bits = TakeOfMask("mask_partial_bits", {"I32", "U32"},
                         {blocks, mask.partial.columns, side, side / 32});
  // Nobody sees anything, in however many heads.
  if (mask.there() && rows == 0) mask.batch = varlen ? Batch() : 1, mask.heads = 1;
}

MaskShape Inputs::MaskOf() const {
  if (!mask.there()) return {};
  const auto side = static_cast<int32_t>(mask.block);
  return {.kind = STROBE_MASK_PACKED,
          .reserved = 0,
          .block_q = side,
          .block_k = side,
          .batch = mask.batch,
          .heads = mask.heads,
          .capacity = 1,
          .partial_capacity = 1};
}

// Packs it with room for one block, to know how much it needs, and then with that.
Buffer Inputs::PackMask(Problem* problem) const {
  Problem here = *problem;
  here.device = Device::kCpu;
  here.device_index = 0;
  // Copies, for a file's numbers lie at any address; and where there are none, a place all the
  // same.
  const auto copied = [&](const TensorInfo* info) {
    Buffer copy(info != nullptr ? info->bytes() + 1 : 0);
    if (info != nullptr && info->bytes() > 0)
      std::memcpy(copy.data(), file_->Read(*info).data(), info->bytes());
    return copy;
  };
  const Buffer keep = copied(mask.keep), bits = copied(mask.bits);
  const auto numbers = [](const std::vector<int32_t>& values) {
    return values.empty() ? nullptr : values.data();
  };
  MaskArgs args = {};
  args.keep = keep.size() > 0 ? reinterpret_cast<const uint8_t*>(keep.data()) : nullptr;
  args.intervals = numbers(mask.intervals);
  args.partial_counts = numbers(mask.partial.counts);
  args.partial_blocks = numbers(mask.partial.blocks);
  args.partial_columns = mask.partial.columns;
  if (args.partial_blocks != nullptr && mask.bits != nullptr)
    args.partial_bits = reinterpret_cast<const uint32_t*>(bits.data());
  args.full_counts = numbers(mask.full.counts);
  args.full_blocks = numbers(mask.full.blocks);
  args.full_columns = mask.full.columns;
  args.cu_seqlens_q = numbers(cu_seqlens_q);
  args.cu_seqlens_k = numbers(cu_seqlens_k);
  // Of no queries there are no numbers, and no mask without them.
  static constexpr uint8_t kNothing = 0;
  if (q.seqlen == 0) args.keep = &kNothing;
  Buffer packed;
  for (int pass = 0; pass < 2; ++pass) {
    problem->mask = here.mask;
    packed = Buffer(mask_bytes(here));
    args.packed = packed.data();
    args.packed_bytes = packed.size();
    pack_mask(here, args);
    const auto* const header = reinterpret_cast<const int32_t*>(packed.data());
    here.mask.capacity = std::max(header[7], 1);
    here.mask.partial_capacity = std::max(header[8], 1);
  }
  return packed;
}

}  // namespace strobe::cli
