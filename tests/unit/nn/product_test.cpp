#include "base/threads/product.h"

#include <ATen/ATen.h>

#include <random>

#include "counted_calls.h"
#include "support/test.h"

extern "C" [[gnu::weak]] int MKL_Set_Num_Threads_Local(int threads);

namespace tessera::nn::product_test {
namespace {

/// As this thread has set it, 0: that of the process.
int threads_of_products() {
  if (MKL_Set_Num_Threads_Local == nullptr) return 0;
  const int threads = MKL_Set_Num_Threads_Local(0);
  MKL_Set_Num_Threads_Local(threads);
  return threads;
}

class Products : public ::testing::Test {
 protected:
  /// The first product sets the number of threads.
  void SetUp() override {
    at::manual_seed(5);
    at::mm(at::ones({2, 2}), at::ones({2, 2}));
    threads_ = threads_of_products();
  }
  void TearDown() override {
    EXPECT_EQ(threads_of_products(), threads_);
    EXPECT_FALSE(base::OneThread::in_this_thread());
  }

 private:
  int threads_ = 0;
};

TEST_F(Products, AreOnOneThreadUpToAMillionMultiplications) {
  const auto run = [](std::int64_t rows, std::int64_t inner, std::int64_t columns) {
    const at::Tensor a = at::ones({rows, inner}), b = at::ones({inner, columns});
    at::Tensor out = at::empty({rows, columns});
    const test::CountedCalls counted({"aten::mm", "aten::addmm"}, base::OneThread::in_this_thread);
    base::mm(a, b);
    base::mm_out(out, a, b);
    base::addmm(at::ones({columns}), a, b);
    EXPECT_EQ(counted.count(), 3);
    return counted.count_when();
  };
  EXPECT_EQ(run(64, 64, 64), 3);
  EXPECT_EQ(run(64, 64, 320), 3);
  EXPECT_EQ(run(64, 64, 321), 0);
  EXPECT_EQ(run(1, 2000, 1000), 0);
}

// Shapes on both sides of what one thread computes, whole and transposed matrices, two dtypes: the
// bits are those of libtorch's product on one thread where they have few rows, else on any number.
TEST_F(Products, HaveTheBitsOfLibtorchs) {
  std::mt19937 draw(5);
  const auto side = [&] { return static_cast<std::int64_t>(1 + draw() % 200); };
  const auto matrix = [&](std::int64_t rows, std::int64_t columns, at::ScalarType dtype) {
    const bool transposed = draw() % 2 == 0;
    return (transposed ? at::randn({columns, rows}).t() : at::randn({rows, columns})).to(dtype);
  };
  for (int i = 0; i < 200; ++i) {
    const auto dtype = i % 4 == 0 ? at::kDouble : at::kFloat;
    const std::int64_t rows = side(), inner = side(), columns = side();
    SCOPED_TRACE(::testing::Message() << rows << " x " << inner << " x " << columns);
    const at::Tensor a = matrix(rows, inner, dtype), b = matrix(inner, columns, dtype);
    const at::Tensor bias = at::randn({columns}).to(dtype);
    at::Tensor out = at::empty({rows, columns}, a.options());
    base::mm_out(out, a, b);
    const base::OneThread one(rows < 16);
    EXPECT_TRUE(at::equal(out, at::mm(a, b)));
    EXPECT_TRUE(at::equal(base::mm(a, b), out));
    EXPECT_TRUE(at::equal(base::addmm(bias, a, b), at::addmm(bias, a, b)));
  }
}

TEST_F(Products, OfShapesThatDoNotFitAreRefused) {
  EXPECT_THROW(base::mm(at::ones({2, 3}), at::ones({2, 3})), c10::Error);
  EXPECT_THROW(base::mm(at::ones({2, 3}), at::ones({3})), c10::Error);
}

}  // namespace
}  // namespace tessera::nn::product_test
