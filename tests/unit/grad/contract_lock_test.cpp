// The lock of a contract: equal contracts have no difference, each change of a value is a line, and
// an edited text is refused with the number of its line.
#include "grad/contract_lock.h"

#include <algorithm>
#include <random>
#include <set>

#include "support/test.h"
#include "unit/grad/contract_cases.h"

namespace tessera::grad::testing::contract_lock_test {
namespace {

ModelContract example(int layers = 3) {
  ModelContract contract;
  std::vector<ParameterMeta> metas{scratch("embed.weight")};
  for (int layer = 0; layer < layers; ++layer) {
    metas.push_back(scratch(concat("layers.", layer, ".weight")));
  }
  contract.parameters = resolve_contracts(metas, mixed_policy(), {{"dp_shard"}, {}, 2});
  contract.buffers.emplace_back().name = "table";
  contract.units.emplace_back();
  return contract;
}

std::vector<std::string> differences(const ModelContract& now, const ModelContract& locked) {
  return differences_from_lock(now, contract_lock(locked), "F");
}

TEST(ContractLock, TheSameContractDiffersInNothing) {
  EXPECT_EQ(differences(example(), example()), std::vector<std::string>());
  EXPECT_EQ(differences({}, {}), std::vector<std::string>());
  ModelContract other = example();
  other.parameters[1].reason(ContractField::kReduce) = "because";
  EXPECT_EQ(differences(other, example()), std::vector<std::string>()) << "reasons change nothing";
}

TEST(ContractLock, AChangeIsItsTwoLines) {
  ModelContract now = example();
  now.parameters[2].reduce = DType::kBFloat16;
  EXPECT_EQ(differences(now, example()),
            (std::vector<std::string>{"- parameter layers.1.weight reduce float32",
                                      "+ parameter layers.1.weight reduce bfloat16"}));
}

TEST(ContractLock, LinesOfRowsAreComparedLikeThoseOfTensors) {
  const std::vector<std::string> two{"context rows parts 4", "context rows degree 2"};
  const std::string lock = contract_lock(example(), two);
  EXPECT_EQ(differences_from_lock(example(), lock, "F", two), std::vector<std::string>());
  EXPECT_EQ(differences_from_lock(example(), lock, "F", {"context rows degree 2"}),
            std::vector<std::string>{"- context rows parts 4"});
  EXPECT_EQ(differences_from_lock(example(), contract_lock(example()), "F", two),
            (std::vector<std::string>{"+ context rows degree 2", "+ context rows parts 4"}));
}

TEST(ContractLock, OrderAndNamesCount) {
  ModelContract now = example();
  std::swap(now.parameters[1], now.parameters[2]);
  EXPECT_FALSE(differences(now, example()).empty());
  now = example();
  now.parameters[3].name = "layers.2.gain";
  const auto found = differences(now, example());
  const auto has = [&](std::string_view line) { return std::ranges::count(found, line) == 1; };
  EXPECT_TRUE(has("- parameter layers.2.weight reduce float32"));
  EXPECT_TRUE(has("+ parameter layers.2.gain reduce float32"));
  const auto more = differences(example(4), example(3));
  EXPECT_TRUE(std::ranges::all_of(more, [](const auto& line) { return line.front() == '+'; }))
      << "a layer more changes no other's lines";
}

// Every field that the contract's hash has is in the lock, too.
TEST(ContractLock, DiffersWhereTheHashDoes) {
  std::mt19937 random(20261129);
  const auto one_of = [&](auto low, auto high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
  for (int draw = 0; draw < 500; ++draw) {
    ModelContract now = example();
    for (int change = one_of(0, 2); change > 0; --change) {
      GradContract& parameter = now.parameters[static_cast<std::size_t>(one_of(0, 3))];
      const DType dtype = kDTypes[one_of(0, 3)];
      switch (one_of(0, 11)) {
        case 0:
          parameter.storage.dtype = dtype;
          break;
        case 1:
          parameter.compute.dtype = dtype;
          break;
        case 2:
          parameter.grad = dtype;
          break;
        case 3:
          parameter.accumulate = dtype;
          break;
        case 4:
          parameter.reduce = dtype;
          break;
        case 5:
          parameter.final = dtype;
          break;
        case 6:
          parameter.trainable = one_of(0, 1) == 1;
          break;
        case 7:
          parameter.reductions.divide_factor = one_of(1, 3);
          break;
        case 8:
          parameter.reductions.shard_axes = {one_of(0, 1) == 1 ? "dp_shard" : "tp"};
          break;
        case 9:
          parameter.shape = {one_of(3, 4), 3};
          break;
        case 10:
          now.buffers[0].compute = dtype;
          break;
        default:
          now.units[0].input = dtype;
          break;
      }
    }
    EXPECT_EQ(differences(now, example()).empty(), hash(now) == hash(example())) << draw;
  }
}

TEST(ContractLock, AnEditedTextIsRefusedByItsLine) {
  const std::string lock = contract_lock(example());
  const auto refused = [&](const std::string& text, std::string_view says) {
    EXPECT_REFUSED(kFormat, differences_from_lock(example(), text, "F"), says);
  };
  refused("", "F, line 1: found the end of the file");
  refused("no lock\n", "F, line 1: found 'no lock'");
  const auto second = lock.find('\n') + 1;
  refused(lock.substr(0, second) + "weight reduce\n", "F, line 2");
  // A line twice, and two lines that changed places.
  const auto third = lock.find('\n', second) + 1;
  const std::string line = lock.substr(second, third - second);
  refused(lock.substr(0, second) + line + lock.substr(second), "F, line 3");
  const auto fourth = lock.find('\n', third) + 1;
  refused(lock.substr(0, second) + lock.substr(third, fourth - third) + line + lock.substr(fourth),
          "F, line 3");
}

// Hostile text ends in an answer or in an error, with any text cut out of it or put into it.
TEST(ContractLock, AnyTextIsAnsweredOrRefused) {
  const std::string lock = contract_lock(example());
  std::mt19937 random(7);
  for (int draw = 0; draw < 2000; ++draw) {
    std::string text = lock;
    for (int edit = 0; edit < 3; ++edit) {
      const auto at = random() % (text.size() + 1);
      if (random() % 2 == 0) {
        text.erase(at, random() % 40);
      } else {
        text.insert(at, 1 + random() % 3, static_cast<char>(random() % 256));
      }
    }
    try {
      EXPECT_EQ(differences_from_lock(example(), text, "F").empty(), text == lock) << draw;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    }
  }
}

}  // namespace
}  // namespace tessera::grad::testing::contract_lock_test
