// A unit that computes what a test says: for what may cross a unit's border, and what is refused
// there.
#pragma once

#include <torch/nn/module.h>

#include "support/plain.h"

namespace tessera::test {

using Several = std::vector<at::Tensor>;

class Body : public torch::nn::Module {
 public:
  static constexpr std::int64_t kWidth = 5;
  using Run = std::function<Several(Body&, const Several&)>;

  /// With a parameter `first` as well where it has values.
  explicit Body(Run run, const at::Tensor& weight_values = seeded(1, {kWidth}) + 1.0,
                const at::Tensor& first_values = {})
      : run_(std::move(run)) {
    if (first_values.defined()) first = register_parameter("first", first_values);
    weight = register_parameter("weight", weight_values);
  }
  Several forward(const Several& inputs) { return run_(*this, inputs); }
  void become(Run run) {
    run_ = std::move(run);
    kept = at::Tensor();
  }
  at::Tensor first, weight;
  at::Tensor kept;  ///< of the last forward, where the test says so

 private:
  Run run_;
};

/// Every rank is told something, and one of them what it is about: the others may come later.
template <class What>
auto all_and_one(const What& what) {
  return ::testing::AllOf(::testing::Each(::testing::Not(std::string())),
                          ::testing::Contains(what));
}

}  // namespace tessera::test
