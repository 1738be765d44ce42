// The guards of the tests' memory: each kind of stray write must be seen. No library code takes
// part.
#include "guarded.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace strobe_test {
namespace {

using oracle::DType;

// A tensor of 2 rows of 3 elements with a gap of 2 after each, which may be written.
struct Rows {
  explicit Rows(DType dtype) : memory(10, oracle::ElementSize(dtype), oracle::ElementSize(dtype)) {
    t.memory = &memory;
    t.dtype = dtype;
    t.batch = t.heads = 1;
    t.rows = 2;
    t.dim = 3;
    t.strides = {0, 5, 0, 1};
    memory.Seal();
    t.AllowWrite();
  }
  void WriteAll() {
    t.ForEach([&](int64_t, int64_t, int64_t, int64_t e) { t.Set(e, 1.5); });
  }
  Guarded memory;
  Strided t;
};

bool Complains(const std::string& error, const char* of) {
  return error.find(of) != std::string::npos;
}

TEST(Guarded, PassesWhatIsRight) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Rows r(dtype);
    EXPECT_TRUE(std::isnan(r.t.Read().data[0])) << "poison";
    r.WriteAll();
    EXPECT_EQ(r.memory.Check("x"), "");
    EXPECT_EQ(r.t.Read().data, std::vector<double>(6, 1.5));
  }
}

TEST(Guarded, SeesEveryStrayWrite) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const int64_t size = oracle::ElementSize(dtype);
    const auto after_write_at = [&](int64_t byte) {
      Rows r(dtype);
      r.WriteAll();
      r.memory.bytes()[byte] = static_cast<char>(r.memory.bytes()[byte] ^ 1);
      return r.memory.Check("x");
    };
    EXPECT_TRUE(Complains(after_write_at(-1), "before its start"));
    EXPECT_TRUE(Complains(after_write_at(-500), "before its start"));
    EXPECT_TRUE(Complains(after_write_at(10 * size), "past its end"));
    EXPECT_TRUE(Complains(after_write_at(10 * size + 400), "past its end"));
    EXPECT_TRUE(Complains(after_write_at(3 * size), "element 3, which is no element of an output"));
    EXPECT_TRUE(Complains(after_write_at(10 * size - 1), "element 9"));
    EXPECT_EQ(after_write_at(5 * size), "") << "an element's own value is not the guard's business";
  }
}

TEST(Guarded, SeesWhatWasNotWritten) {
  Rows r(DType::kBFloat16);
  r.WriteAll();
  std::memcpy(r.memory.at(6), &kPoison, 2);
  EXPECT_TRUE(Complains(r.memory.Check("x"), "element 6 was not written"));
}

TEST(Guarded, SeesChangedInputs) {
  Rows r(DType::kFloat32);
  r.WriteAll();
  r.memory.Seal();
  r.memory.ForbidWrites();
  EXPECT_EQ(r.memory.Check("x"), "");
  r.t.Set(0, 1.25);
  EXPECT_TRUE(Complains(r.memory.Check("x"), "element 0"));
}

TEST(Guarded, ZonesOfAWorkspace) {
  Guarded workspace(100, 1);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(workspace.bytes()) % 64, 0u);
  workspace.Seal();
  std::memset(workspace.bytes(), 0, 100);
  EXPECT_EQ(workspace.CheckZones("w"), "");
  workspace.bytes()[100] = 0;
  EXPECT_NE(workspace.CheckZones("w"), "");
  Guarded nothing(0, 4);
  nothing.Seal();
  EXPECT_EQ(nothing.Check("n"), "");
}

}  // namespace
}  // namespace strobe_test
