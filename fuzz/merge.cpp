// Merging partial results, and adding gradients of parts, under arbitrary input, by the rules of
// abi.cpp.
#include <cstdint>
#include <iterator>
#include <limits>

#include "input.h"
#include "strobe/strobe.h"
#include "tensor.h"

namespace {

// One number of a merge goes where no memory is: it has to be refused.
void spoil_merge(Input& in, strobe_merge_args& a) {
  int32_t* const words[] = {&a.device, &a.device_index, &a.out_dtype, &a.threads};
  int64_t* const extents[] = {&a.parts, &a.batch, &a.seqlen_q, &a.heads, &a.head_dim_v};
  switch (in.take<uint8_t>() % 16) {
    case 0:
      *words[in.take<uint8_t>() % std::size(words)] = in.flag() ? -1 : 1 << 20;
      break;
    case 1:
      *extents[in.take<uint8_t>() % std::size(extents)] = in.take<int64_t>() | INT64_MIN;
      break;
    case 2:
      a.struct_size = in.take<uint8_t>();
      break;
    case 3:
      a.outs = nullptr;
      break;
    case 4:
      a.lses = reinterpret_cast<const float*>(reinterpret_cast<uintptr_t>(a.lses) + 2);
      break;
    case 5:
      a.out = nullptr;
      break;
    case 6: {  // refused where there is a second row
      strobe_strides* const strides[] = {&a.outs_strides, &a.lses_strides, &a.out_strides,
                                         &a.lse_strides};
      strides[in.take<uint8_t>() % std::size(strides)]->seqlen = in.flag() ? INT64_MIN : INT64_MAX;
      break;
    }
    case 7:  // where there is a second part
      (in.flag() ? a.outs_part : a.lses_part) = in.flag() ? INT64_MIN : INT64_MAX;
      break;
    case 8:  // the parts' own memory: refused where there are rows, but in the place of one of them
      if (a.parts > 0) a.out = const_cast<float*>(a.outs);
      break;
    case 9:
      if (a.parts > 0) a.lse = const_cast<float*>(a.lses);
      break;
    default:
      break;
  }
}

// Partial results of any strides and their merger, with parts and rows that hold no keys.
void check_merge(Input& in) {
  strobe_merge_args a = {};
  a.struct_size = sizeof a;
  a.out_dtype = static_cast<int32_t>(in.range(0, 2));
  a.threads = static_cast<int32_t>(in.range(0, 2));
  a.parts = in.range(0, 5), a.batch = in.range(0, 3);
  a.seqlen_q = in.range(0, 9), a.heads = in.range(0, 3);
  const int64_t rows = a.seqlen_q, heads = a.heads, dim = in.range(1, in.flag() ? 512 : 9);
  a.head_dim_v = dim;
  a.outs_strides = take_strides(in, rows, heads, dim);
  a.lses_strides = take_strides(in, rows, heads, 1);
  a.out_strides = take_strides(in, rows, heads, dim);
  a.lse_strides = take_strides(in, rows, heads, 1);
  a.outs_part = in.flag() ? in.range(-9000, 9000) : 0;
  a.lses_part = in.flag() ? in.range(-900, 900) : 0;
  // What zeros stand for.
  const auto or_else = [](const strobe_strides& s, const strobe_strides& contiguous) {
    return s.batch == 0 && s.seqlen == 0 && s.head == 0 && s.dim == 0 ? contiguous : s;
  };
  const strobe_strides values = {rows * heads * dim, heads * dim, dim, 1},
                       numbers = {rows * heads, 1, rows, 1};
  const int64_t count = a.batch * rows * heads;
  Tensor outs(a.batch, rows, heads, dim, or_else(a.outs_strides, values), 4, 1, a.parts,
              a.outs_part ? a.outs_part : count * dim);
  Tensor lses(a.batch, rows, heads, 1, or_else(a.lses_strides, numbers), 4, 2, a.parts,
              a.lses_part ? a.lses_part : count);
  Tensor out(a.batch, rows, heads, dim, or_else(a.out_strides, values),
             a.out_dtype == STROBE_FLOAT32 ? 4 : 2, 3);
  Tensor lse(a.batch, rows, heads, 1, or_else(a.lse_strides, numbers), 4, 4);
  for (const Tensor* t : {&outs, &lses, &out, &lse}) {
    if (!t->fits()) return;
  }
  for (int64_t n = in.range(0, 40); n > 0 && lses.elements() > 0; --n) {
    lses.put(in.range(0, lses.elements() - 1), in.flag()   ? -std::numeric_limits<float>::infinity()
                                               : in.flag() ? std::numeric_limits<float>::infinity()
                                                           : in.take<float>());
  }
  a.outs = outs.as<float>(), a.lses = lses.as<float>();
  a.out = out.get(), a.lse = in.flag() ? lse.as<float>() : nullptr;
  spoil_merge(in, a);
  const strobe_status status = strobe_merge(&a);
  require_documented(status);
  REQUIRE(outs.unchanged() || (status == STROBE_OK && a.out == a.outs));
  REQUIRE(lses.unchanged() || (status == STROBE_OK && a.lse == a.lses));
  REQUIRE(status == STROBE_OK || (out.unchanged() && lse.unchanged()));
  REQUIRE(a.lse == lse.as<float>() || lse.unchanged());
}

// Gradients of a part in any strides, and where they go; one number may go where no memory is.
void check_add(Input& in) {
  strobe_add_args a = {};
  a.struct_size = sizeof a;
  a.out_dtype = static_cast<int32_t>(in.range(0, 2));
  a.threads = static_cast<int32_t>(in.range(0, 2));
  a.accumulate = in.flag();
  a.batch = in.range(0, 3), a.seqlen = in.range(0, 9), a.heads = in.range(0, 3);
  const int64_t rows = a.seqlen, heads = a.heads, dim = in.range(1, in.flag() ? 512 : 9);
  a.head_dim = dim;
  a.x_strides = take_strides(in, rows, heads, dim);
  a.out_strides = take_strides(in, rows, heads, dim);
  const auto resolved = [&](const strobe_strides& s) {
    const bool unset = s.batch == 0 && s.seqlen == 0 && s.head == 0 && s.dim == 0;
    return unset ? strobe_strides{rows * heads * dim, heads * dim, dim, 1} : s;
  };
  Tensor x(a.batch, rows, heads, dim, resolved(a.x_strides), 4, 1);
  Tensor out(a.batch, rows, heads, dim, resolved(a.out_strides),
             a.out_dtype == STROBE_FLOAT32 ? 4 : 2, 2);
  if (!x.fits() || !out.fits()) return;
  a.x = x.as<float>(), a.out = out.get();
  int64_t* const numbers[] = {&a.accumulate, &a.batch, &a.seqlen, &a.heads, &a.head_dim};
  switch (in.take<uint8_t>() % 12) {
    case 0:
      *numbers[in.take<uint8_t>() % std::size(numbers)] = in.take<int64_t>() | INT64_MIN;
      break;
    case 1:
      (in.flag() ? a.device_index : a.out_dtype) = in.flag() ? -1 : 1 << 20;
      break;
    case 2:
      a.struct_size = in.take<uint8_t>();
      break;
    case 3:
      a.x = nullptr;
      break;
    case 4:
      a.out = in.flag() ? nullptr : const_cast<float*>(a.x);
      break;
    case 5:  // refused where there is a second row
      (in.flag() ? a.x_strides : a.out_strides).seqlen = in.flag() ? INT64_MIN : INT64_MAX;
      break;
    default:
      break;
  }
  const strobe_status status = strobe_add(&a);
  require_documented(status);
  REQUIRE(x.unchanged());
  REQUIRE(status == STROBE_OK || out.unchanged());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  check_merge(in);
  check_add(in);
  return 0;
}
