// Which tensors of arguments and results are found, and that they can be replaced.
#include "tessera/visit_tensors.h"

#include <ATen/ATen.h>

#include "support/test.h"

namespace tessera::visit_tensors_test {
namespace {

template <class T>
int count(T value) {
  int seen = 0;
  visit_tensors(value, [&](at::Tensor&) { ++seen; });
  return seen;
}

const at::Tensor kOne = at::ones({1});

struct Custom {
  at::Tensor first = kOne;
  std::vector<at::Tensor> more = {kOne, kOne};
  int other = 0;
  template <class F>
  void visit_tensors(F&& f) {
    f(first);
    for (auto& one : more) f(one);
  }
};

TEST(VisitTensors, FindsThemInEveryContainer) {
  EXPECT_EQ(count(kOne), 1);
  EXPECT_EQ(count(at::Tensor()), 1) << "undefined ones too: f decides";
  EXPECT_EQ(count(std::optional<at::Tensor>()), 0);
  EXPECT_EQ(count(std::optional(kOne)), 1);
  EXPECT_EQ(count(std::vector{kOne, kOne}), 2);
  EXPECT_EQ((count(std::array<at::Tensor, 3>{kOne, kOne, kOne})), 3);
  EXPECT_EQ((count(std::map<std::string, at::Tensor>{{"a", kOne}, {"b", kOne}})), 2);
  EXPECT_EQ((count(std::unordered_map<int, std::vector<at::Tensor>>{{1, {kOne, kOne}}})), 2);
  EXPECT_EQ(count(std::tuple{kOne, 1, std::string("x"), std::pair{kOne, 2.0}}), 2);
  EXPECT_EQ(count(Custom{}), 3);
  EXPECT_EQ(count(std::vector<Custom>(2)), 6);
  EXPECT_EQ(count(std::vector<bool>{true, false}), 0);
  EXPECT_EQ(count(7), 0);
  EXPECT_EQ(count(std::string("x")), 0);
}

TEST(VisitTensors, MayReplaceThem) {
  std::tuple<at::Tensor, std::optional<at::Tensor>, Custom> value{kOne, kOne, {}};
  visit_tensors(value, [](at::Tensor& tensor) { tensor = tensor + 1; });
  EXPECT_EQ(std::get<0>(value).item<float>(), 2);
  EXPECT_EQ(std::get<1>(value)->item<float>(), 2);
  EXPECT_EQ(std::get<2>(value).more[1].item<float>(), 2);
}

}  // namespace
}  // namespace tessera::visit_tensors_test
