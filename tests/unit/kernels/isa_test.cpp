// Every instruction set that this machine has computes the same.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

#include "kernels/cpu/tables.h"
#include "support/test.h"

namespace tessera::kernels::cpu::isa_test {
namespace {

constexpr long kRows = 5;
constexpr long kColumns = 83;

std::vector<float> numbers(std::uint64_t seed, double scale = 1.0) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const at::Tensor drawn = at::randn({kRows * kColumns}, generator) * scale;
  const float* first = drawn.const_data_ptr<float>();
  return {first, first + drawn.numel()};
}

/// Isas differ by fused multiply-adds only: some units in the last place of the largest term.
void expect_near(const std::vector<float>& found, const std::vector<float>& expected,
                 const char* isa) {
  float largest = 0.0F;
  for (const float value : expected) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], 1e-6F * largest) << isa << " element " << i;
  }
}

class Isas : public ::testing::Test {
 protected:
  /// Runs `use(isa)` -> results on every one that runs here.
  template <class Use>
  void compare(const Use& use) {
    const std::vector<float> expected = use(best_isa());
    for (int i = 0; i < isas().count; ++i) {
      if (isas().choices[i].supported) {
        expect_near(use(*isas().choices[i].isa), expected, isas().choices[i].isa->name);
      }
    }
  }
};

/// `count` elements whose end is the end of what may be read or written.
template <class T>
class AtTheEnd {
 public:
  explicit AtTheEnd(std::size_t count) : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
    memory_ = static_cast<std::byte*>(
        mmap(nullptr, 2 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_EQ(mprotect(memory_ + page_, page_, PROT_NONE), 0);
    data_ = reinterpret_cast<T*>(memory_ + page_ - count * sizeof(T));
  }
  ~AtTheEnd() { munmap(memory_, 2 * page_); }
  AtTheEnd(const AtTheEnd&) = delete;
  AtTheEnd& operator=(const AtTheEnd&) = delete;
  T* data() const { return data_; }

 private:
  std::size_t page_;
  std::byte* memory_;
  T* data_;
};

/// Both directions of the clamped gate, of the first `count` elements.
template <class T>
std::vector<T> clamped_gates(const Kernels<T, T>& kernels, const std::vector<T>& both,
                             const std::vector<T>& grad, std::size_t count) {
  const AtTheEnd<T> in(2 * count), of_out(count), out(count), of_in(2 * count);
  std::copy_n(both.begin(), 2 * count, in.data());
  std::copy_n(grad.begin(), count, of_out.data());
  const ClampedSwigluJob<T> job{.both = in.data(),
                                .out = out.data(),
                                .grad = of_out.data(),
                                .grad_both = of_in.data(),
                                .alpha = 1.702F,
                                .limit = 2.0F};
  kernels.clamped_swiglu_forward(job, 0, static_cast<long>(count));
  kernels.clamped_swiglu_backward(job, 0, static_cast<long>(count));
  std::vector<T> results(out.data(), out.data() + count);
  results.insert(results.end(), of_in.data(), of_in.data() + 2 * count);
  return results;
}

/// For any number of elements, up to 48, which are whole vectors: the first results.
template <class T>
void expect_first_results(const Kernels<T, T>& kernels, const std::vector<T>& both,
                          const std::vector<T>& grad, const char* isa) {
  constexpr std::size_t kWhole = 48;
  const std::vector<T> whole = clamped_gates(kernels, both, grad, kWhole);
  for (std::size_t count = 1; count < kWhole; ++count) {
    const std::vector<T> found = clamped_gates(kernels, both, grad, count);
    EXPECT_EQ(std::memcmp(found.data(), whole.data(), count * sizeof(T)), 0)
        << isa << ": " << count << " gates";
    EXPECT_EQ(std::memcmp(found.data() + count, whole.data() + kWhole, 2 * count * sizeof(T)), 0)
        << isa << ": gradients of " << count << " gates";
  }
}

TEST_F(Isas, BaselineIsThereAndRuns) {
  const IsaChoice& last = isas().choices[isas().count - 1];
  EXPECT_STREQ(last.isa->name, "baseline");
  EXPECT_TRUE(last.supported);
}

TEST_F(Isas, NormsAgree) {
  const std::vector<float> x = numbers(1), weight = numbers(2), grad = numbers(3);
  compare([&](const Isa& isa) {
    std::vector<float> y(kRows * kColumns), scale(kRows);
    isa.fp32.norm_forward(NormForward<float, float>{.x = x.data(),
                                                    .residual = nullptr,
                                                    .weight = weight.data(),
                                                    .sum = nullptr,
                                                    .y = y.data(),
                                                    .scale = scale.data(),
                                                    .columns = kColumns,
                                                    .eps = 1e-6F},
                          0, kRows);
    std::vector<float> grad_x(kRows * kColumns), grad_weight(kColumns);
    isa.fp32.norm_backward(NormBackward<float, float>{.grad = grad.data(),
                                                      .grad_sum = nullptr,
                                                      .x = x.data(),
                                                      .weight = weight.data(),
                                                      .scale = scale.data(),
                                                      .grad_x = grad_x.data(),
                                                      .grad_weight = grad_weight.data(),
                                                      .columns = kColumns},
                           0, kRows);
    y.insert(y.end(), grad_x.begin(), grad_x.end());
    y.insert(y.end(), grad_weight.begin(), grad_weight.end());
    return y;
  });
}

TEST_F(Isas, SoftmaxAgrees) {
  const std::vector<float> scores = numbers(4, 10.0);
  compare([&](const Isa& isa) {
    std::vector<float> weights = scores;
    isa.fp32.causal_softmax(CausalRows<float>{.scores = weights.data(),
                                              .weights = nullptr,
                                              .sums = nullptr,
                                              .seen = {.begins = nullptr,
                                                       .ends = nullptr,
                                                       .from = 0,
                                                       .keys = kColumns,
                                                       .first = 70,
                                                       .window = 1000,
                                                       .groups = 1,
                                                       .repeat = 1,
                                                       .period = kRows},
                                              .scale = 0.7F},
                            0, kRows);
    return weights;
  });
}

// Rows of two groups of two heads: positions 47 and 48, which see 20 keys or all.
TEST_F(Isas, WindowsAndSinksAgree) {
  constexpr long kHeadRows = 8, kKeys = 50;
  const std::vector<float> scores = numbers(7, 10.0), grads = numbers(8);
  const std::vector<float> sinks{0.5F, 3.0F, -20.0F, 30.0F};
  for (const long window : {20L, 1000L}) {
    compare([&](const Isa& isa) {
      std::vector<float> weights(scores.begin(), scores.begin() + kHeadRows * kKeys);
      std::vector<float> grad(grads.begin(), grads.begin() + kHeadRows * kKeys);
      std::vector<float> shares(kHeadRows);
      WindowRows job{.scores = weights.data(),
                     .weights = nullptr,
                     .sinks = sinks.data(),
                     .shares = shares.data(),
                     .seen = {.begins = nullptr,
                              .ends = nullptr,
                              .from = 0,
                              .keys = kKeys,
                              .first = 47,
                              .window = window,
                              .groups = 2,
                              .repeat = 2,
                              .period = 4},
                     .scale = 0.7F};
      isa.window_softmax(job, 0, kHeadRows);
      job.scores = grad.data();
      weights.insert(weights.end(), shares.begin(), shares.end());
      job.weights = weights.data();
      isa.window_softmax_backward(job, 0, kHeadRows);
      weights.insert(weights.end(), grad.begin(), grad.end());
      weights.insert(weights.end(), shares.begin(), shares.end());
      return weights;
    });
  }
}

TEST_F(Isas, CrossEntropyAgrees) {
  const std::vector<float> logits = numbers(5, 10.0);
  const std::vector<long> targets{0, 82, -100, 41, 7};
  compare([&](const Isa& isa) {
    std::vector<float> log_sum(kRows), grad(kRows * kColumns);
    std::vector<double> loss(kRows);
    const CrossEntropy<float> job{.logits = logits.data(),
                                  .targets = targets.data(),
                                  .log_sum = log_sum.data(),
                                  .loss = loss.data(),
                                  .grad_logits = grad.data(),
                                  .grad = 0.25F,
                                  .vocabulary = kColumns};
    isa.fp32.cross_entropy_forward(job, 0, kRows);
    isa.fp32.cross_entropy_backward(job, 0, kRows);
    for (const double value : loss) grad.push_back(static_cast<float>(value));
    return grad;
  });
}

TEST_F(Isas, ClampedSwigluAgrees) {
  const std::vector<float> both = numbers(7, 2.0), grad = numbers(8);
  compare([&](const Isa& isa) {
    constexpr long kElements = kRows * kColumns / 2;
    std::vector<float> results(3 * kElements);
    const ClampedSwigluJob<float> job{.both = both.data(),
                                      .out = results.data(),
                                      .grad = grad.data(),
                                      .grad_both = results.data() + kElements,
                                      .alpha = 1.702F,
                                      .limit = 2.0F};
    isa.fp32.clamped_swiglu_forward(job, 0, kElements);
    isa.fp32.clamped_swiglu_backward(job, 0, kElements);
    return results;
  });
}

// The last vector of a row is shorter: it gives the bits of a whole one and accesses nothing behind
// the row.
TEST_F(Isas, ShortVectorsGiveTheBitsOfWholeOnesAndTouchNothingElse) {
  const std::vector<float> both = numbers(9, 2.0), grad = numbers(10);
  const auto narrowed = [](const std::vector<float>& values) {
    const at::Tensor narrow = at::tensor(values).to(at::kBFloat16);
    const auto* first = static_cast<const BFloat16*>(narrow.const_data_ptr());
    return std::vector<BFloat16>(first, first + narrow.numel());
  };
  for (int i = 0; i < isas().count; ++i) {
    if (!isas().choices[i].supported) continue;
    const Isa& isa = *isas().choices[i].isa;
    expect_first_results(isa.fp32, both, grad, isa.name);
    expect_first_results(isa.bf16, narrowed(both), narrowed(grad), isa.name);
  }
}

// Rounding to bf16 is integer work: the same bits everywhere, and those of c10.
TEST_F(Isas, RoundingToBFloat16IsThatOfLibtorch) {
  std::vector<float> values = numbers(6, 1e3);
  values[0] = std::numeric_limits<float>::quiet_NaN();
  values[1] = std::numeric_limits<float>::infinity();
  values[2] = -std::numeric_limits<float>::infinity();
  values[3] = 1.00390625F;    // half way, down to even
  values[4] = 1.01171875F;    // half way, up to even
  values[5] = 3.3961775e38F;  // rounds to infinity
  values[6] = 1e-40F;         // no normal number
  values[7] = -0.0F;
  const at::Tensor rounded = at::tensor(values).to(at::kBFloat16);
  const auto* expected = static_cast<const BFloat16*>(rounded.const_data_ptr());
  // The norm of a row of ones is 1, times a weight in fp32: what is stored is the rounded weight.
  const std::vector<BFloat16> ones(values.size(), BFloat16{0x3F80});
  for (int i = 0; i < isas().count; ++i) {
    if (!isas().choices[i].supported) continue;
    std::vector<BFloat16> found(values.size());
    float scale = 0.0F;
    isas().choices[i].isa->bf16_wide_weights.norm_forward(
        NormForward<BFloat16, float>{.x = ones.data(),
                                     .residual = nullptr,
                                     .weight = values.data(),
                                     .sum = nullptr,
                                     .y = found.data(),
                                     .scale = &scale,
                                     .columns = static_cast<long>(values.size()),
                                     .eps = 0.0F},
        0, 1);
    ASSERT_EQ(scale, 1.0F);
    for (std::size_t k = 1; k < found.size(); ++k) {
      EXPECT_EQ(found[k].bits, expected[k].bits) << isas().choices[i].isa->name << " " << k;
    }
    EXPECT_GT(found[0].bits & 0x7FFF, 0x7F80) << "NaN became a number";
  }
}

}  // namespace
}  // namespace tessera::kernels::cpu::isa_test
