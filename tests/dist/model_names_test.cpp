// Names of what several modules of a model register: those of the plain model, whichever of its
// modules are units, so that what one cut has saved any other loads.

#include <random>

#include "base/text/wildcard.h"
#include "dist/checkpoint_tensors.h"
#include "dist/stepped.h"
#include "support/plain.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "tessera/checkpoint.h"
#include "tessera/state_dict.h"
#include "tessera/trainable.h"

namespace tessera::test::model_names_test {
namespace {

using Names = std::set<std::string>;

/// A module of a drawn tree.
class Node : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) { return x; }
};

/// Whether a module is a unit of its own.
enum class Cut : std::uint8_t {
  kNo,
  kHandle,  ///< its handle stands in its place
  kPlain,   ///< it stands there itself, and the unit around it is told of the handle
};

/// A tree of modules of which some register the same tensors, the same module or one module twice,
/// drawn from `seed`. `cut` is asked once for each child, below its parent and in another order
/// than the modules': the later ones are sharded first.
class DrawnTree {
 public:
  DrawnTree(unsigned seed, Mesh mesh, std::function<Cut()> cut)
      : random_(seed), mesh_(std::move(mesh)), cut_(std::move(cut)) {
    for (std::uint64_t i = 0; i < 3; ++i) {
      parameters_.push_back(seeded(70 + i, {4, 3}));
      buffers_.push_back(seeded(80 + i, {5}));
    }
    module_ = std::make_shared<Node>();
    module_->register_parameter("inside", seeded(90, {2, 3}));
    module_->register_buffer("table", buffers_.at(0));
    root = made(3);
    for (const auto& [parent, name] : shared_) parent->register_module(name, module_);
    shard_below(root, inner);
  }

  std::shared_ptr<Node> root;
  std::vector<std::shared_ptr<ShardedBase>> inner;  // of the unit that is the root

 private:
  struct Child {
    std::string name;
    std::shared_ptr<Node> node;
    bool twice;
  };

  unsigned below(unsigned end) { return static_cast<unsigned>(random_() % end); }
  std::uint64_t next() { return 1000 + 10 * count_++; }

  std::shared_ptr<Node> made(int depth) {
    auto node = std::make_shared<Node>();
    if (below(2) == 0) node->register_parameter("own", seeded(next(), {3, 2}), below(3) != 0);
    if (below(2) == 0) node->register_parameter("shared", parameters_.at(below(3)));
    if (below(4) == 0) node->register_parameter("another", parameters_.at(below(3)));
    if (below(3) == 0) node->register_buffer("count", seeded(next(), {2}));
    if (below(2) == 0) node->register_buffer("table", buffers_.at(below(3)));
    if (below(6) == 0) shared_.emplace_back(node.get(), "common");
    const unsigned children = depth == 0 ? 0 : 1 + below(3);
    for (unsigned i = 0; i < children; ++i) {
      const Child child{concat("part", i), made(depth - 1), below(8) == 0};
      node->register_module(child.name, child.node);
      if (child.twice) node->register_module(child.name + "_again", child.node);
      children_[node.get()].push_back(child);
    }
    return node;
  }

  void shard_below(const std::shared_ptr<Node>& node,
                   std::vector<std::shared_ptr<ShardedBase>>& around) {
    auto& children = children_[node.get()];
    for (auto child = children.rbegin(); child != children.rend(); ++child) {
      const auto cut = cut_();
      ShardOptions options;
      shard_below(child->node, cut == Cut::kNo ? around : options.inner);
      if (cut == Cut::kNo) continue;
      const auto handle =
          std::make_shared<Sharded<Node>>(fully_shard(child->node, mesh_, {}, options));
      if (cut == Cut::kPlain) {
        around.push_back(handle);
        continue;
      }
      node->replace_module(child->name, handle);
      if (child->twice) node->replace_module(child->name + "_again", handle);
    }
  }

  std::mt19937 random_;
  Mesh mesh_;
  std::function<Cut()> cut_;
  std::uint64_t count_ = 0;
  std::vector<at::Tensor> parameters_, buffers_;
  std::shared_ptr<Node> module_;
  std::vector<std::pair<Node*, std::string>> shared_;
  std::map<const Node*, std::vector<Child>> children_;
};

/// The names that libtorch gives the tensors of a plain module.
struct PlainNames {
  explicit PlainNames(const torch::nn::Module& plain) {
    std::map<const void*, std::string> seen;
    for (const auto& entry : plain.named_parameters()) {
      all.insert(entry.key());
      const auto [first, is_new] = seen.emplace(entry.value().unsafeGetTensorImpl(), entry.key());
      first_of.emplace(entry.key(), first->second);
      if (!is_new) continue;
      parameters.insert(entry.key());
      if (entry.value().requires_grad()) trained.insert(entry.key());
    }
    for (const auto& entry : plain.named_buffers()) {
      all.insert(entry.key());
      if (seen.emplace(entry.value().unsafeGetTensorImpl(), "").second) buffers.insert(entry.key());
    }
  }
  Names all, parameters, buffers, trained;      // the first of each tensor, but for `all`
  std::map<std::string, std::string> first_of;  // by each name of a parameter
};

struct DrawnModel {
  DrawnModel(unsigned seed, const Mesh& mesh, const std::function<Cut()>& cut, ShardOptions options)
      : tree(seed, mesh, cut), model([&] {
          options.inner = tree.inner;
          return fully_shard(tree.root, mesh, {}, options);
        }()) {}
  DrawnTree tree;
  Sharded<Node> model;
};

/// A drawn model, trained a little.
struct Trained : DrawnModel {
  Trained(unsigned seed, const Mesh& mesh, const std::function<Cut()>& cut, ShardOptions options)
      : DrawnModel(seed, mesh, cut, std::move(options)),
        optimizer(make_adamw(model, adamw(0.01))) {}

  void step(int number) {
    step_by_name(model, *optimizer, number);
    const at::NoGradGuard no_grad;
    for (auto& view : model.buffers()) view.tensor.fill_(number);
  }
  std::unique_ptr<Optimizer> optimizer;
};

std::vector<std::string> keys_of(const StateDict& dict) {
  std::vector<std::string> names;
  for (const auto& entry : dict) names.push_back(entry.name);
  std::ranges::sort(names);
  return names;
}

template <class Dict>
Names names_of(const Dict& dict) {
  Names names;
  for (const auto& entry : dict) names.insert(entry.key());
  return names;
}

void expect_names(const Trained& run, const PlainNames& plain) {
  const std::vector<std::string> all(plain.all.begin(), plain.all.end());
  EXPECT_EQ(keys_of(state_dict(run.model, StateDictKind::kFull)), all);
  EXPECT_EQ(keys_of(state_dict(run.model, StateDictKind::kSharded)), all);
  const auto on_zero = keys_of(state_dict(run.model, StateDictKind::kFullOnRankZero));
  if (run.model.rank() == 0) {
    EXPECT_EQ(on_zero, all);
  }
  EXPECT_EQ(names_of(run.model.named_parameters()), plain.parameters);
  EXPECT_EQ(names_of(run.model.named_buffers()), plain.buffers);
  Names stepped;
  for (const auto& state : optimizer_state_dict(run.model, *run.optimizer).parameters) {
    EXPECT_TRUE(stepped.insert(state.parameter).second) << state.parameter;
  }
  EXPECT_EQ(stepped, plain.trained);
}

/// The checkpoint at `folder` has each tensor once.
void expect_tensors(const std::string& folder, const PlainNames& plain) {
  Names expected;
  for (const auto& name : plain.parameters) expected.insert("model/" + name);
  for (const auto& name : plain.buffers) expected.insert("model/" + name);
  for (const auto& name : plain.trained) {
    for (const auto* kept : {"exp_avg", "exp_avg_sq", "step"}) {
      expected.insert(concat("optim/", kept, "/", name));
    }
  }
  Names found;
  for (const auto& [name, bytes] : all_tensors(folder)) found.insert(name);
  EXPECT_EQ(found, expected);
}

// Naive: what two modules register is named by which of them was sharded first, and has that name
// alone; of a buffer that two modules of one unit register the second name is missing.
TEST(ModelNames, AreThoseOfThePlainModelForAnyUnits) {
  const TemporaryFolder folder;
  for (const int count : {1, 2, 3}) {
    ranks(count).run([&](World& world) {
      const auto mesh = data_mesh(world);
      std::size_t names = 0, tensors = 0, units = 0;
      for (unsigned seed = 0; seed < 8; ++seed) {
        SCOPED_TRACE(concat(count, " ranks, seed ", seed));
        const auto never = [] { return Cut::kNo; };
        const PlainNames plain(*DrawnTree(seed, mesh, never).root);
        names += plain.all.size();
        tensors += plain.parameters.size() + plain.buffers.size();
        std::mt19937 draw(seed);
        const auto drawn = [&] { return static_cast<Cut>(draw() % 3); };
        std::vector<std::unique_ptr<Trained>> cuts;
        for (int i = 0; i < 3; ++i) {
          ShardOptions options;
          if (i == 2) options.merge_below_bytes = 50;
          cuts.push_back(std::make_unique<Trained>(
              seed, mesh, i == 0 ? std::function<Cut()>(never) : drawn, options));
          cuts.back()->step(i + 1);
          expect_names(*cuts.back(), plain);
          units += cuts.back()->model.contract().units.size();
        }
        for (std::size_t i = 0; i < 6; ++i) {
          auto& from = *cuts[i % 3];
          auto& to = *cuts[(i + (i < 3 ? 1 : 2)) % 3];
          from.step(static_cast<int>(10 + i));
          const auto saved = whole_state(from.model, *from.optimizer);
          load_state_dict(to.model, state_dict(from.model, StateDictKind::kFull));
          load_optimizer_state_dict(to.model, *to.optimizer,
                                    optimizer_state_dict(from.model, *from.optimizer));
          expect_same(whole_state(to.model, *to.optimizer), saved, "by dicts");
          to.step(20);
          const auto path = folder / concat(count, " ranks ", seed, " ", i);
          save_checkpoint(from.model, *from.optimizer, path, 50);
          if (world.rank() == 0) expect_tensors(path / "step-50", plain);
          load_checkpoint(to.model, *to.optimizer, path);
          expect_same(whole_state(to.model, *to.optimizer), saved, "by a checkpoint");
        }
      }
      EXPECT_GT(names, tensors + 60) << "many names of one tensor";
      EXPECT_GT(units, 8U * 3 * 3);
    });
  }
}

void step_by(const ShardedBase& model, Optimizer& optimizer, double gradient) {
  for (const auto& view : model.shards()) {
    if (view.contract->trainable) {
      view.shard.mutable_grad() = at::full_like(view.shard.detach(), gradient);
    }
  }
  optimizer.step();
}

/// The parameters that a step with gradients of zero changes.
Names decayed_by(const ShardedBase& model, Optimizer& optimizer, const PlainNames& plain) {
  const auto before = whole_parameters(model);
  step_by(model, optimizer, 0);
  Names changed;
  for (const auto& [name, values] : whole_parameters(model)) {
    if (!same_bits(values, before.at(name))) changed.insert(plain.first_of.at(name));
  }
  return changed;
}

Names without(Names names, const Names& others) {
  for (const auto& name : others) names.erase(name);
  return names;
}

/// Each pattern is one name of a trained parameter.
void expect_patterns(DrawnModel& drawn, const PlainNames& plain,
                     const std::vector<std::string>& patterns) {
  auto& model = drawn.model;
  Names matched;
  for (const auto& [name, first] : plain.first_of) {
    for (const auto& pattern : patterns) {
      if (plain.trained.contains(first) && matches_name(pattern, name)) matched.insert(first);
    }
  }
  AdamWOptions options;
  options.no_decay = {patterns.begin(), patterns.end() - 1};
  options.rules = {{.match = {patterns.back()}, .weight_decay = 0.0}};
  const auto adamw = make_adamw(model, options);
  EXPECT_EQ(decayed_by(model, *adamw, plain), without(plain.trained, matched));

  MuonOptions muon_options;
  muon_options.adamw = patterns;
  const auto muon = make_muon(model, muon_options);
  step_by(model, *muon, 1);
  Names by_adamw;
  for (const auto& state : optimizer_state_dict(model, *muon).parameters) {
    if (state.kept.contains("exp_avg")) by_adamw.insert(state.parameter);
  }
  EXPECT_EQ(by_adamw, matched);

  model.zero_grad();
  set_trainable(model, {{patterns, false}});
  Names still_trained;
  for (const auto& [name, values] : whole_gradients(model)) {
    still_trained.insert(plain.first_of.at(name));
  }
  EXPECT_EQ(still_trained, without(plain.trained, matched));
}

// Naive: a pattern is compared with the names in the unit that a tensor is of. Where another cut
// gives it to another unit, the pattern matches nothing, or the tensor is missed in silence.
TEST(ModelNames, APatternOfAnOptimizerIsComparedWithEveryNameForAnyUnits) {
  for (const int count : {1, 2}) {
    ranks(count).run([&](World& world) {
      const auto mesh = data_mesh(world);
      std::size_t later_names = 0;
      for (unsigned seed = 0; seed < 8; ++seed) {
        const PlainNames plain(*DrawnTree(seed, mesh, [] { return Cut::kNo; }).root);
        std::vector<std::string> of_trained;
        for (const auto& [name, first] : plain.first_of) {
          if (plain.trained.contains(first)) of_trained.push_back(name);
        }
        std::mt19937 draw(seed);
        for (int i = 0; i < 3; ++i) {
          std::vector<std::string> patterns;
          for (int k = 0; k < 3; ++k) patterns.push_back(of_trained.at(draw() % of_trained.size()));
          for (const auto& pattern : patterns) later_names += plain.parameters.count(pattern) == 0;
          SCOPED_TRACE(concat(count, " ranks, seed ", seed, ": ", patterns[0], ", ", patterns[1],
                              ", ", patterns[2]));
          ShardOptions options;
          if (i == 2) options.merge_below_bytes = 50;
          DrawnModel drawn(seed, mesh, [&] { return static_cast<Cut>(draw() % 3); }, options);
          expect_patterns(drawn, plain, patterns);
        }
      }
      EXPECT_GT(later_names, 20U);
    });
  }
}

/// Two modules with one tensor each, registered as both names say.
class Pair : public torch::nn::Module {
 public:
  enum class Has : std::uint8_t {
    kTiedWeight,
    kTwoWeights,
    kTiedBuffer,
    kTwoBuffers,
    kOtherBuffers,
    kNarrowerCopy,
    kNarrowerOther,
    kWiderCopy,
  };
  Pair(Has has, const char* first, const char* second) {
    const auto one = std::make_shared<Node>(), other = std::make_shared<Node>();
    const auto value = seeded(1, {4, 3});
    if (has == Has::kTiedWeight || has == Has::kTwoWeights) {
      one->register_parameter("it", value);
      other->register_parameter("it", has == Has::kTiedWeight ? value : seeded(1, {4, 3}));
    } else {
      register_parameter("weight", seeded(2, {3}));
      one->register_buffer("it", value);
      other->register_buffer("it", has == Has::kTiedBuffer      ? value
                                   : has == Has::kTwoBuffers    ? value.clone()
                                   : has == Has::kNarrowerCopy  ? value.to(at::kBFloat16)
                                   : has == Has::kNarrowerOther ? (value + 1).to(at::kBFloat16)
                                   : has == Has::kWiderCopy     ? value.to(at::kDouble)
                                                                : value + 1);
    }
    register_module(first, one);
    register_module(second, other);
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};
using Has = Pair::Has;

struct TrainedPair {
  TrainedPair(World& world, Has has, const char* first = "a", const char* second = "b")
      : model(fully_shard(std::make_shared<Pair>(has, first, second), data_mesh(world))),
        optimizer(make_adamw(model, adamw(0.01))) {}
  Sharded<Pair> model;
  std::unique_ptr<Optimizer> optimizer;
};

Tensors tensors_of(const ShardedBase& model) {
  Tensors values;
  for (auto& entry : state_dict(model, StateDictKind::kFull)) values[entry.name] = entry.values;
  return values;
}

// Checkpoints of before have a tensor under the name of the unit that was sharded first, and a
// buffer under the name of each.
TEST(ModelNames, ACheckpointMayHaveAnyNameOfATensor) {
  const TemporaryFolder folder;
  for (const int count : {1, 2}) {
    ranks(count).run([&](World& world) {
      for (const auto has : {Has::kTiedWeight, Has::kTiedBuffer}) {
        const auto path = folder / concat(count, has == Has::kTiedWeight ? " weight" : " buffer");
        TrainedPair other(world, has, "b", "a");
        step_by_name(other.model, *other.optimizer, 1);
        const auto name = has == Has::kTiedWeight ? "optim/exp_avg/b.it" : "model/b.it";
        save_checkpoint(other.model, *other.optimizer, path, 1);
        EXPECT_EQ(all_tensors(path / "step-1").count(name), 1U);
        TrainedPair run(world, has);
        step_by_name(run.model, *run.optimizer, 2);
        load_checkpoint(run.model, *run.optimizer, path);
        expect_same(tensors_of(run.model), tensors_of(other.model));
        const auto found = optimizer_state_dict(run.model, *run.optimizer).parameters;
        const auto expected = optimizer_state_dict(other.model, *other.optimizer).parameters;
        ASSERT_EQ(found.size(), 1U);
        EXPECT_EQ(found[0].steps, 1);
        expect_same(found[0].kept, expected.at(0).kept);
      }
    });
  }
}

TEST(ModelNames, TwoTensorsOfACheckpointAreOneOnlyWhereTheyAreBuffersOfTheSameValues) {
  const TemporaryFolder folder;
  const auto refusal = [&](Has saved, Has loaded, const char* name) {
    std::string message;
    ranks(2).run([&](World& world) {
      TrainedPair from(world, saved);
      save_checkpoint(from.model, *from.optimizer, folder / name, 0);
      TrainedPair to(world, loaded);
      const auto error =
          thrown_by([&] { load_checkpoint(to.model, *to.optimizer, folder / name); });
      if (world.rank() == 0) message = error;
    });
    return message;
  };
  EXPECT_EQ(refusal(Has::kTwoBuffers, Has::kTiedBuffer, "same"), "");
  EXPECT_THAT(refusal(Has::kOtherBuffers, Has::kTiedBuffer, "other"),
              Says("model/a.it", "model/b.it", "other values"));
  EXPECT_THAT(refusal(Has::kNarrowerOther, Has::kTiedBuffer, "narrower other"),
              Says("model/a.it", "model/b.it", "other values"));
  EXPECT_THAT(refusal(Has::kWiderCopy, Has::kTiedBuffer, "wider"),
              Says("model/b.it", "found float64", "expected float32"));
  EXPECT_THAT(refusal(Has::kTwoWeights, Has::kTiedWeight, "weights"),
              Says("found the tensor", "model/b.it"));
}

// Checkpoints of before have a buffer in a narrower dtype under the name in a unit that was sharded
// after another one had cast it. Naive: every name is held to the dtype of the widest.
TEST(ModelNames, ACheckpointMayHaveABufferInANarrowerDTypeUnderAnotherName) {
  const TemporaryFolder folder;
  for (const int count : {1, 2}) {
    ranks(count).run([&](World& world) {
      for (const bool canonical_is_narrower : {false, true}) {
        SCOPED_TRACE(canonical_is_narrower);
        const auto path = folder / concat(count, canonical_is_narrower ? " first" : " second");
        const auto* wide = canonical_is_narrower ? "b" : "a";
        TrainedPair from(world, Has::kNarrowerCopy, wide, canonical_is_narrower ? "a" : "b");
        save_checkpoint(from.model, *from.optimizer, path, 0);
        TrainedPair run(world, Has::kTiedBuffer);
        const at::NoGradGuard no_grad;
        for (auto& view : run.model.buffers()) view.tensor.zero_();
        load_checkpoint(run.model, *run.optimizer, path);
        const auto expected = tensors_of(from.model).at(concat(wide, ".it"));
        const auto found = tensors_of(run.model);
        EXPECT_TRUE(same_bits(found.at("a.it"), expected));
        EXPECT_TRUE(same_bits(found.at("b.it"), expected));
      }
    });
  }
}

}  // namespace
}  // namespace tessera::test::model_names_test
