// The routing of a batch file, imposed: the recorded one is the model's own, so it changes no bit.

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "support/test.h"

namespace tessera::golden::imposed_routing_test {
namespace {

class ImposedRouting : public ::testing::TestWithParam<std::string> {};

TEST_P(ImposedRouting, OfTheSameChoiceChangesNoBit) {
  const std::string batch = Reference::of(GetParam()).batches();
  for (const Layout& layout :
       {Layout{.ranks = 1, .micro_batches = MicroBatches::kOneRow}, Layout{.ranks = 3}}) {
    SCOPED_TRACE(to_string(layout));
    auto config = config_for(layout);
    config.model.path = data_folder(GetParam());
    const auto own = run_gradients(config, layout, batch);
    expect_same_bits(run_gradients(config, layout, batch, Routing::kImposed), own);
  }
}

INSTANTIATE_TEST_SUITE_P(Folders, ImposedRouting, ::testing::ValuesIn(folders_with_experts()),
                         folder_name);

}  // namespace
}  // namespace tessera::golden::imposed_routing_test
