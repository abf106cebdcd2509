#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "support/test.h"
#include "train/config/config.h"
#include "train/config/config_keys.h"
#include "unit/train/config/config_fixture.h"

namespace tessera::train::config_parse_test {
namespace {

std::string parse_refusal(const std::string& text) {
  return error_of(ErrorKind::kConfig, [&] { parse_config(text, "run.toml"); });
}

TEST(ConfigParse, EmptyTextGivesTheDefaults) { EXPECT_EQ(parse_config("", "x"), Config{}); }

TEST(ConfigParse, ReadsEverySection) {
  const Config config = parse_config(R"(
device = "CPU"
[job]
dump_folder = "out"
[model]
path = "folder"
freeze = []
[data]
path = ["a.txt", "b.txt"]
[training]
steps = 3
global_batch_size = 8
max_norm = 0
[parallelism]
data_parallel_replicate_degree = 2
reshard_after_forward = false
[precision]
param_dtype = "Float32"
storage_dtype = "auto"
[optimizer]
name = "sgd"
lr = 1
betas = [0.8, 0.99]
[lr_scheduler]
decay = "Cosine"
[pipeline]
overlap = "All"
[comm]
master_port = 29500
[debug]
seed = 7
)",
                                     "run.toml");
  EXPECT_EQ(config.device, DeviceName::kCpu);
  EXPECT_EQ(config.job.dump_folder, "out");
  EXPECT_EQ(config.model.freeze, std::vector<std::string>{});
  EXPECT_EQ(config.data.path, (std::vector<std::string>{"a.txt", "b.txt"}));
  EXPECT_EQ(config.training.steps, 3);
  EXPECT_EQ(config.training.max_norm, 0.0);
  EXPECT_EQ(config.parallelism.data_parallel_replicate_degree, 2);
  EXPECT_FALSE(config.parallelism.reshard_after_forward);
  EXPECT_EQ(config.precision.param_dtype.dtype, DType::kFloat32);
  EXPECT_EQ(config.precision.storage_dtype.dtype, std::nullopt);
  EXPECT_EQ(config.optimizer.name, OptimizerName::kSgd);
  EXPECT_EQ(config.optimizer.lr, 1.0);
  EXPECT_EQ(config.optimizer.effective_weight_decay(), 0.0);
  EXPECT_EQ(config.lr_scheduler.decay, LrDecay::kCosine);
  EXPECT_EQ(config.pipeline.overlap, pipeline::Overlap::kAll);
  EXPECT_EQ(config.comm.master_port, 29500);
  EXPECT_EQ(config.debug.seed, 7);
}

TEST(ConfigParse, ReadsPrecisionRulesInOrder) {
  const Config config = parse_config(R"([precision]
reduce_dtype = "float32"
[[precision.rule]]
match = "*norm"
param_dtype = "float32"
pin = true
[[precision.rule]]
match = ["mlp.gate", "lm_head"]
grad_dtype = "bfloat16"
frozen = false
)",
                                     "run.toml");
  ASSERT_EQ(config.precision.rule.size(), 2u);
  EXPECT_EQ(config.precision.rule[0].match, std::vector<std::string>{"*norm"});
  EXPECT_EQ(config.precision.rule[0].param_dtype, DType::kFloat32);
  EXPECT_EQ(config.precision.rule[0].pin, true);
  EXPECT_EQ(config.precision.rule[1].grad_dtype, DType::kBFloat16);
  EXPECT_EQ(config.precision.rule[1].frozen, FrozenRule::kNo);
  EXPECT_EQ(precision_policy(config.precision).rules, config.precision.rule);
}

TEST(ConfigParse, ReadsOptimizerRulesInOrder) {
  const Config config = parse_config(R"([optimizer]
lr = 1e-3
[[optimizer.rule]]
match = "*bias"
weight_decay = 0
[[optimizer.rule]]
match = ["lm_head", "layers.0"]
lr_scale = 0.5
[[optimizer.rule]]
match = "experts"
split_fused = false
)",
                                     "run.toml");
  ASSERT_EQ(config.optimizer.rule.size(), 3u);
  EXPECT_EQ(config.optimizer.rule[2], (OptimizerRule{.match = {"experts"}, .split_fused = false}));
  EXPECT_EQ(config.optimizer.rule[0], (OptimizerRule{{"*bias"}, std::nullopt, 0.0}));
  EXPECT_EQ(config.optimizer.rule[1], (OptimizerRule{{"lm_head", "layers.0"}, 0.5, std::nullopt}));
  EXPECT_EQ(parse_config(to_toml(config), "again.toml"), config);
}

TEST(ConfigParse, FrozenOfARuleIsAFlagOrTheWayItIsKept) {
  const auto frozen = [](const std::string& value) {
    return parse_config("[[precision.rule]]\nmatch = \"x\"\nfrozen = " + value, "x")
        .precision.rule[0]
        .frozen;
  };
  EXPECT_EQ(frozen("true"), FrozenRule::kYes);
  EXPECT_EQ(frozen("false"), FrozenRule::kNo);
  EXPECT_EQ(frozen("\"shard\""), FrozenRule::kShard);
  EXPECT_EQ(frozen("\"Replicate\""), FrozenRule::kReplicate);
  EXPECT_REFUSED(kConfig, frozen("\"whole\""), "precision.rule[1].frozen: found \"whole\"",
                 "expected true, false, \"shard\" or \"replicate\"");
}

TEST(ConfigParse, PrecisionPolicyCarriesWhatTheContractDependsOn) {
  const Config config = parse_config(R"([precision]
intrinsic = "All"
on_narrower_request = "error"
[optimizer]
master = "none"
no_decay = "norm"
)",
                                     "run.toml");
  const PrecisionPolicy policy = precision_policy(config.precision, config.optimizer);
  EXPECT_EQ(policy.intrinsic, Intrinsic::kAll);
  EXPECT_EQ(policy.on_narrower_request, NarrowerRequest::kError);
  EXPECT_EQ(policy.optimizer.master, MasterRequest::kNone);
  EXPECT_EQ(policy.optimizer.no_decay, std::vector<std::string>{"norm"});
  EXPECT_TRUE(policy.loss_scaling) << "the program scales where float16 needs it";
}

// RUN/config.toml of an earlier run has every key of then, and is trained on from.
TEST(ConfigParse, AKeyThatIsGoneIsPassedOverWhereNoOneHadSetItAndElseRefusedByName) {
  EXPECT_EQ(parse_config("[compile]\noffload_folder = \"\"\nform = 2", "x"),
            parse_config("[compile]\nform = 2", "x"));
  for (const char* set : {"\"state\"", "true", "[]"}) {
    EXPECT_THAT(parse_refusal(concat("[compile]\nform = 2\noffload_folder = ", set)),
                AllOf(StartsWith("run.toml:3:1: unknown key 'compile.offload_folder'; it is no key "
                                 "here: what a rank trains is in the memory that trains it; "),
                      Says("parallelism.data_parallel_shard_degree shares it among more "),
                      Says("lora.rank"), Says("optimizer.name SGD keeps less")));
  }
  EXPECT_NE(parse_refusal("[compile]\noffload = \"\""), "");
}

TEST(ConfigParse, StepsToTraceAreAListOrOneOfThem) {
  EXPECT_EQ(parse_config("metrics.trace_steps = [3, 4]", "x").metrics.trace_steps,
            (std::vector<std::int64_t>{3, 4}));
  EXPECT_EQ(parse_config("metrics.trace_steps = 7", "x").metrics.trace_steps,
            std::vector<std::int64_t>{7});
  EXPECT_TRUE(parse_config("metrics.trace_steps = []", "x").metrics.trace_steps.empty());
}

struct BadText {
  std::string text;
  std::string place;    // after "run.toml:"
  std::string message;  // a part of what is said
};

class ConfigRefusals : public ::testing::TestWithParam<BadText> {};

TEST_P(ConfigRefusals, NamePlaceKeyAndWhatWasFound) {
  const std::string message = parse_refusal(GetParam().text);
  EXPECT_THAT(message, StartsWith("run.toml:" + GetParam().place));
  EXPECT_THAT(message, Says(GetParam().message));
  EXPECT_EQ(message.find('\n'), std::string::npos) << "one line";
}

INSTANTIATE_TEST_SUITE_P(
    Texts, ConfigRefusals,
    ::testing::Values(
        BadText{"metrics.trace_steps = [3, 0]", "1:", "metrics.trace_steps: found 0 (integer)"},
        BadText{"metrics.trace_steps = [\"3\"]", "1:", "expected an integer"},
        BadText{"[training\n", "1:10: ", ""}, BadText{"a = 1\na = 2\n", "2:", ""},
        BadText{"[training]\nsteps = \"ten\"\n",
                "2:9: ", "training.steps: found \"ten\" (string), expected an integer"},
        BadText{"[training]\nsteps = 0\n", "2:9: ", "found 0 (integer), expected at least 1"},
        BadText{"[training]\nsteps = 2.5\n", "2:9: ", "found 2.5 (number), expected an integer"},
        BadText{"[training]\nglobal_batch_size = 0\n", "2:21: ", "expected -1 or at least 1"},
        BadText{"[training]\nmax_norm = nan\n", "2:12: ", "training.max_norm: found nan"},
        BadText{"[optimizer]\nlr = inf\n", "2:6: ", "optimizer.lr: found inf"},
        BadText{"[optimizer]\nlr = inf\n", "2:6: ", "expected a finite number, at least 0"},
        BadText{"[optimizer]\nlr = -nan\n", "2:6: ", "expected a finite number, at least 0"},
        BadText{"[optimizer]\nlr = 1e999\n", "2:",
                "optimizer.lr: found a number that 64 bits do not hold, expected 0 or a "
                "number from 2.2"},
        BadText{"[optimizer]\nbetas = [inf, 0.9]\n", "2:9: ", "expected a finite number"},
        BadText{"[grad_scaler]\ninit_scale = inf\n",
                "2:14: ", "grad_scaler.init_scale: found inf (number), expected a finite number"},
        BadText{"[debug]\nseed = 9223372036854775808\n", "2:",
                "debug.seed: found a number that 64 bits do not hold, expected an integer from "
                "-9223372036854775808 to 9223372036854775807"},
        BadText{"debug.seed = 0xffff_ffff_ffff_ffff\n",
                "1:", "debug.seed: found a number that 64 bits do not hold"},
        BadText{"[comm]\n\nmaster_port = 4294967297\n",
                "3:15: ", "comm.master_port: found 4294967297 (integer), expected a value from 1"},
        BadText{"[training]\nglobal_batch_size = 9223372036854775807\n",
                "2:21: ", "expected -1 or at least 1 and at most 1000000000"},
        BadText{"[optimizer]\nbetas = [0.9]\n", "2:9: ", "expected a list of 2 numbers"},
        BadText{"[optimizer]\nbetas = [0.9, 1.0]\n", "2:9: ", "numbers from 0 to 1, 1 excluded"},
        BadText{"[optimizer]\nname = \"Lion\"\n", "2:8: ", "expected one of AdamW | SGD"},
        BadText{"[pipeline]\noverlap = \"expert\"\n",
                "2:11: ", "expected one of experts | all | off"},
        BadText{"[pipeline]\noverlap = true\n", "2:11: ", "expected one of experts | all | off"},
        BadText{"[optimizer]\nmomentum = 1979-05-27\n", "2:12: ", "found a date"},
        BadText{"[optimizer.lr]\nx = 1\n", "1:1: ", "optimizer.lr: found {x = 1} (table)"},
        BadText{"[parallelism]\ndata_parallel_shard_degree = 0\n",
                "2:30: ", "expected -1 or at least 1"},
        BadText{"[parallelism]\ntensor_parallel_degree = 99999999999\n",
                "2:26: ", "expected at least 1 and at most 1000000000"},
        BadText{"[precision]\nparam_dtype = \"float8\"\n",
                "2:15: ", "expected one of float32 | bfloat16 | float16 | auto"},
        BadText{"[precision]\nrule = 3\n", "2:8: ", "expected a list of tables"},
        BadText{"[[precision.rule]]\nparam_dtype = \"float32\"\n", "1:", "precision.rule[1].match"},
        BadText{"[[precision.rule]]\nmatch = []\n", "1:", "precision.rule[1].match"},
        BadText{"[[precision.rule]]\nmatch = [\"a\"]\nparam_dtype = \"auto\"\n",
                "1:", "precision.rule[1].param_dtype: found \"auto\""},
        BadText{"[[precision.rule]]\nmatch = [\"a\"]\nparam_type = \"float32\"\n",
                "1:", "unknown key 'param_type'; the nearest is \"param_dtype\""},
        BadText{"[training]\nstepz = 3\n",
                "2:1: ", "unknown key 'training.stepz'; the nearest is \"training.steps\""},
        BadText{"[trainig]\nsteps = 3\n",
                "1:2: ", "unknown section 'trainig'; the nearest is [training]"},
        BadText{"devize = \"cpu\"\n", "1:1: ", "unknown key 'devize'; the nearest is \"device\""},
        BadText{"training = 3\n", "1:12: ", "expected a section [training]"},
        BadText{"[[training]]\nsteps = 3\n", "1:", "expected a section [training]"},
        BadText{"[device]\nx = 1\n", "1:", "device: found"},
        BadText{"[data]\npath = [1, 2]\n", "2:8: ", "data.path: found 1 (integer)"},
        BadText{"[data]\npath = \"\xff\"\n", "2:", ""}));

TEST(ConfigParse, RefusesDeepNestingBeforeItIsParsed) {
  std::string dotted = "a";
  for (int i = 0; i < 100'000; ++i) dotted += ".a";
  EXPECT_THAT(parse_refusal(dotted + " = 1"), Says("nested"));
  EXPECT_THAT(parse_refusal("x = 1\n[" + dotted + "]"), Says("line 2"));
  EXPECT_THAT(parse_refusal("a = " + std::string(100'000, '[')), Says("nested"));
  std::string tables = "a = ";
  for (int i = 0; i < 100'000; ++i) tables += "{a = ";
  EXPECT_THAT(parse_refusal(tables), Says("nested"));
}

TEST(ConfigParse, DotsAndBracketsInStringsAndCommentsAreNoNesting) {
  const std::string dots(200, '.');
  const std::string brackets(200, '[');
  const Config config =
      parse_config("# " + dots + brackets + "\n[data]\npath = [\"" + dots + "\", '" + brackets +
                       "', \"\"\"\n" + dots + "\\\"\"\"\"]\n",
                   "x");
  EXPECT_EQ(config.data.path, (std::vector<std::string>{dots, brackets, dots + "\""}));
}

TEST(ConfigParse, LettersOutsideOfAsciiAreNoWhiteSpace) {
  const Config config = parse_config("[data]\npath = [\"\"\"\\\n\u00a7a\"\"\"]\n", "x");
  EXPECT_EQ(config.data.path, std::vector<std::string>{"\u00a7a"});
  EXPECT_THAT(parse_refusal("\u0253 = 1"), Says("run.toml:1:1"));
}

TEST(ConfigParse, RefusesAHugeText) {
  EXPECT_THAT(parse_refusal("# " + std::string(5 << 20, 'x')), Says("expected at most"));
}

TEST(ConfigLoad, SaysWhichFileCannotBeRead) {
  EXPECT_REFUSED(kIo, load_config("/nonexistent/run.toml"), "/nonexistent/run.toml");
  EXPECT_REFUSED(kIo, load_config("/"), "/");
}

TEST(ConfigOverride, ReadsTomlAndBareWords) {
  Config config;
  apply_override(config, "optimizer.betas", "[0.9, 0.99]");
  apply_override(config, "optimizer.name", "sgd");
  apply_override(config, "optimizer.lr", "3e-4");
  apply_override(config, "training.steps", "12");
  apply_override(config, "data.path", "dir/a b.txt");
  apply_override(config, "job.dump_folder", "2026");
  apply_override(config, "model.freeze", R"(["model.embed*"])");
  apply_override(config, "device", "cpu");
  apply_override(config, "metrics.enable_tensorboard", "false");
  apply_override(config, "precision.rule", R"([{match = "*norm", param_dtype = "float32"}])");
  EXPECT_EQ(config.optimizer.betas[1], 0.99);
  EXPECT_EQ(config.optimizer.name, OptimizerName::kSgd);
  EXPECT_EQ(config.optimizer.lr, 3e-4);
  EXPECT_EQ(config.training.steps, 12);
  EXPECT_EQ(config.data.path, std::vector<std::string>{"dir/a b.txt"});
  EXPECT_EQ(config.job.dump_folder, "2026");
  EXPECT_EQ(config.model.freeze, std::vector<std::string>{"model.embed*"});
  EXPECT_EQ(config.device, DeviceName::kCpu);
  ASSERT_EQ(config.precision.rule.size(), 1u);
  EXPECT_EQ(config.precision.rule[0].match, std::vector<std::string>{"*norm"});
}

TEST(ConfigOverride, RefusalsNameTheKey) {
  Config config;
  const auto override_refusal = [&](ErrorKind kind, const char* key, const char* value) {
    return error_of(kind, [&] { apply_override(config, key, value); });
  };
  EXPECT_THAT(override_refusal(ErrorKind::kUsage, "training.stpes", "3"),
              Says("unknown key '--training.stpes'; the nearest is --training.steps"));
  EXPECT_THAT(override_refusal(ErrorKind::kConfig, "training.steps", "ten"),
              Says("--training.steps: found \"ten\" (string), expected an integer"));
  EXPECT_THAT(override_refusal(ErrorKind::kConfig, "training.steps", "1.5"),
              Says("found 1.5 (number)"));
  EXPECT_THAT(override_refusal(ErrorKind::kConfig, "optimizer.lr", "inf"),
              Says("--optimizer.lr: found inf (number), expected a finite number, at least"));
  EXPECT_THAT(override_refusal(ErrorKind::kConfig, "debug.seed", "99999999999999999999"),
              Says("(string), expected an integer from -9223372036854775808 to 9223372036854"
                   "775807"));
  EXPECT_THAT(override_refusal(ErrorKind::kConfig, "training.steps", "1\nx = 2"), Says("(string)"));
  EXPECT_THAT(override_refusal(ErrorKind::kConfig, "optimizer.betas", "[0.9, 0.95"),
              Says("not TOML"));
  EXPECT_THAT(override_refusal(ErrorKind::kUsage, "data.path", "\xff\xfe"), Says("UTF-8"));
  EXPECT_THAT(override_refusal(ErrorKind::kConfig, "training.steps", ""), Says("\"\""));
}

TEST(ConfigDump, DefaultsReadBackEqual) {
  EXPECT_EQ(parse_config(to_toml(Config{}), "dump"), Config{});
}

RC_GTEST_PROP(ConfigDump, AnyConfigReadsBackEqual, ()) {
  Config config = parse_config(kSmallConfig, "small");
  const auto names = *rc::gen::nonEmpty(rc::gen::container<std::vector<std::string>>(
      rc::gen::nonEmpty(rc::gen::container<std::string>(rc::gen::inRange<char>(1, 127)))));
  config.data.path = names;
  config.optimizer.lr =
      *rc::gen::map(rc::gen::inRange(0, 1 << 30), [](int i) { return i * 1e-17; });
  config.training.steps = *rc::gen::inRange<std::int64_t>(1, 1000000000);
  config.training.max_norm = *rc::gen::inRange(0, 1000);
  config.precision.storage_dtype = *rc::gen::element(DTypeChoice{}, DTypeChoice{DType::kFloat16});
  config.lr_scheduler.decay =
      *rc::gen::element(LrDecay::kConstant, LrDecay::kLinear, LrDecay::kCosine, LrDecay::kWsd);
  config.lr_scheduler.decay_steps = *rc::gen::element<std::optional<std::int64_t>>(std::nullopt, 7);
  config.optimizer.rule = {{names, *rc::gen::element<std::optional<double>>(std::nullopt, 0.25),
                            *rc::gen::element<std::optional<double>>(std::nullopt, 0.0)}};
  PrecisionRule rule;
  rule.match = names;
  rule.param_dtype = DType::kBFloat16;
  rule.widen = *rc::gen::arbitrary<bool>();
  rule.frozen = *rc::gen::element(FrozenRule::kNo, FrozenRule::kYes, FrozenRule::kShard,
                                  FrozenRule::kReplicate);
  config.model.frozen = *rc::gen::element(FrozenAs::kShard, FrozenAs::kReplicate);
  config.precision.intrinsic =
      *rc::gen::element(Intrinsic::kMinority, Intrinsic::kAll, Intrinsic::kNone);
  config.precision.on_narrower_request =
      *rc::gen::element(NarrowerRequest::kKeep, NarrowerRequest::kNarrow, NarrowerRequest::kError);
  config.optimizer.master = *rc::gen::element(MasterRequest::kAuto, MasterRequest::kNone);
  config.activation_checkpoint.mode =
      *rc::gen::element(RecomputeMode::kNone, RecomputeMode::kFull, RecomputeMode::kSelective);
  config.lora = {*rc::gen::inRange<std::int64_t>(0, 99), 0.5, names, 0.25};
  config.grad_scaler.growth_interval = *rc::gen::inRange<std::int64_t>(1, 9999);
  config.precision.rule.push_back(rule);
  RC_ASSERT(parse_config(to_toml(config), "dump") == config);
}

RC_GTEST_PROP(ConfigParse, AnyBytesGiveAConfigOrAnError, (const std::string& bytes)) {
  try {
    parse_config(bytes, "any");
  } catch (const Error& error) {
    RC_ASSERT(error.kind() == ErrorKind::kConfig);
  }
}

}  // namespace
}  // namespace tessera::train::config_parse_test
