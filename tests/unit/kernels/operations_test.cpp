// The list takes what libtorch's dispatcher takes, so that whoever records operations can register
// it as it stands.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include "kernels/implementations.h"

namespace tessera::kernels::operations_test {
namespace {

TEST(Operations, TheWholeListCanBeRegistered) {
  torch::Library library(torch::Library::FRAGMENT, "tessera_list", std::nullopt, __FILE__,
                         __LINE__);
#define TESSERA_REGISTERED(name) library.def(#name, &kernels::name);
  TESSERA_KERNELS(TESSERA_REGISTERED)
#undef TESSERA_REGISTERED
  const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow("tessera_list::swiglu", "");
  const at::Tensor gate = at::arange(12, at::kFloat), up = gate - 5;
  torch::jit::Stack stack{gate, up};
  operation.callBoxed(stack);
  EXPECT_TRUE(at::equal(stack.at(0).toTensor(), kernels::swiglu(gate, up)));
}

}  // namespace
}  // namespace tessera::kernels::operations_test
