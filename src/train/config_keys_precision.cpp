#include "train/config_section.h"

namespace tessera::train {

template <>
struct EnumWords<Rounding> {
  static constexpr std::array<std::pair<std::string_view, Rounding>, 2> kWords{
      {{"nearest_even", Rounding::kNearestEven}, {"half_away", Rounding::kHalfAway}}};
};
template <>
struct EnumWords<Intrinsic> {
  static constexpr std::array<std::pair<std::string_view, Intrinsic>, 3> kWords{
      {{"minority", Intrinsic::kMinority}, {"all", Intrinsic::kAll}, {"none", Intrinsic::kNone}}};
};
template <>
struct EnumWords<NarrowerRequest> {
  static constexpr std::array<std::pair<std::string_view, NarrowerRequest>, 3> kWords{
      {{"keep", NarrowerRequest::kKeep},
       {"narrow", NarrowerRequest::kNarrow},
       {"error", NarrowerRequest::kError}}};
};
template <>
struct EnumWords<RecomputeMode> {
  static constexpr std::array<std::pair<std::string_view, RecomputeMode>, 3> kWords{
      {{"none", RecomputeMode::kNone},
       {"full", RecomputeMode::kFull},
       {"selective", RecomputeMode::kSelective}}};
};
template <>
struct Codec<Rounding> : EnumCodec<Rounding> {};
template <>
struct Codec<Intrinsic> : EnumCodec<Intrinsic> {};
template <>
struct Codec<NarrowerRequest> : EnumCodec<NarrowerRequest> {};
template <>
struct Codec<RecomputeMode> : EnumCodec<RecomputeMode> {};

namespace {

void add_adapters_and_scaler(std::vector<ConfigKey>& keys) {
  using R = LoraRequest;
  Section(keys, "lora", &Config::lora)
      .key("rank", &R::rank,
           {"",
            "Rank of the adapters that are trained beside a frozen model; 0 trains the model "
            "itself."},
           count_from(0))
      .key("alpha", &R::alpha,
           {"", "The adapters' part of a result is multiplied by alpha / rank; above 0.", "rank"},
           at_least(0))
      .key("targets", &R::targets,
           {"patterns",
            "Linear layers that get an adapter, by the end of their names: q_proj, "
            "layers.0.self_attn.*."})
      .key("dropout", &R::dropout, {"", "Share of an adapter's input that is dropped in training."},
           below_one());
  using S = GradScalerOptions;
  Section(keys, "grad_scaler", &Config::grad_scaler)
      .key("init_scale", &S::init_scale,
           {"",
            "What the loss is first multiplied by, where float16 computes or carries gradients; "
            "this and the factors are powers of two."})
      .key("growth_factor", &S::growth_factor, {"", "Factor after growth_interval finite steps."},
           at_least(1))
      .key("backoff_factor", &S::backoff_factor,
           {"", "Factor after a step whose gradients are not finite; that step is left out."},
           between(0, 1))
      .key("growth_interval", &S::growth_interval,
           {"steps", "Finite steps in a row before the scale grows."}, count_from(1))
      .key("min_scale", &S::min_scale,
           {"", "The smallest scale; gradients that are not finite at it end the run."});
}

}  // namespace

void add_precision(std::vector<ConfigKey>& keys) {
  using D = PrecisionConfig;
  Section(keys, "precision", &Config::precision)
      .key("param_dtype", &D::param_dtype,
           {"", "Parameters in forward and backward; auto is their storage dtype."})
      .key("param_rounding", &D::param_rounding,
           {"",
            "How float32 storage becomes bfloat16 parameters: halves to even, or away from zero as "
            "bfloat16 storage with its master rounds."})
      .key("reduce_dtype", &D::reduce_dtype, {"", "Gradients on the wire; auto is float32."})
      .key("storage_dtype", &D::storage_dtype, {"", "Sharded parameters; auto is the file's."})
      .key("accumulate_dtype", &D::accumulate_dtype,
           {"", "Gradient sums before and after the wire; never narrower than reduce_dtype."})
      .key("activation_reduce_dtype", &D::activation_reduce_dtype,
           {"", "Sums of activations over ranks; auto is the activation's own."})
      .key("intrinsic", &D::intrinsic,
           {"",
            "Which tensors of a checkpoint compute in their stored dtype at least: those stored "
            "wider than most of it, all, or none."})
      .key("on_narrower_request", &D::on_narrower_request,
           {"",
            "What a storage_dtype does that cannot hold a tensor's values: keep the file's dtype, "
            "narrow the values, or error."})
      .key("rule", &D::rule,
           {"",
            "[[precision.rule]]: match = [patterns] with any of param_dtype reduce_dtype "
            "storage_dtype accumulate_dtype grad_dtype pin widen frozen (true, false, shard, "
            "replicate); the last match wins."});
  Section(keys, "activation_checkpoint", &Config::activation_checkpoint)
      .key("mode", &ActivationCheckpointConfig::mode,
           {"",
            "What a layer forgets after forward and computes again for backward: none, full: all "
            "but its input, selective: all but its input and the results of its weight products."});
  add_adapters_and_scaler(keys);
}

}  // namespace tessera::train
