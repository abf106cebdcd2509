#include "models/adapters.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <set>

#include "base/text/printable.h"
#include "base/text/wildcard.h"
#include "models/description.h"
#include "models/family.h"
#include "models/language_model.h"
#include "models/moe_layer.h"
#include "nn/linear.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr std::string_view kWeight = ".weight";
/// Around the products of experts (MoeLayer, Gemma4TextLayer).
constexpr std::string_view kOfExperts = ".experts.";
constexpr std::string_view kA = ".lora_A.weight";
constexpr std::string_view kB = ".lora_B.weight";

std::string_view without(std::string_view name, std::string_view ending) {
  return name.substr(0, name.size() - ending.size());
}

/// The name of the linear layer whose weight a row is; none for other rows.
std::optional<std::string> linear_layer(const ParameterSpec& row) {
  if (row.part == ModelPart::kExperts && row.shape.size() == 3 && !is_adapter(row.name)) {
    return row.name;
  }
  const bool is_matrix = row.shape.size() == 2 && row.name.ends_with(kWeight);
  const bool is_head = !row.tied_to.empty();
  if (!is_matrix || (row.decay != DecayClass::kMatrix && !is_head)) return std::nullopt;
  return std::string(without(row.name, kWeight));
}

/// Why a linear layer can have no adapter; empty where it can.
std::string refusal(const ParameterSpec& row) {
  if (!row.tied_to.empty()) {
    return concat("is tied to ", row.tied_to, ": an adapter could not be merged into both");
  }
  if (row.part == ModelPart::kRouter) {
    return "is a router, whose choice of experts has no gradient";
  }
  return {};
}

/// Whether a pattern matches the last components of a name.
bool matches_end(const std::string& pattern, const std::string& layer) {
  const auto dots = std::ranges::count(pattern, '.');
  std::size_t begin = layer.size();
  for (std::int64_t i = 0; i <= dots; ++i) {
    if (begin == 0) return false;
    const std::size_t dot = layer.rfind('.', begin - 1);
    begin = dot == std::string::npos ? 0 : dot;
  }
  return dotted_match(pattern, std::string_view(layer).substr(begin == 0 ? 0 : begin + 1));
}

/// Experts have most of a model's weights: "*" or "down_proj" is not how one asks for them.
bool means(const std::string& pattern, const std::string& layer) {
  return matches_end(pattern, layer) &&
         (!is_of_experts(layer) || pattern.find(kOfExperts.substr(1)) != std::string::npos);
}

[[noreturn]] void refuse_pattern(const std::string& pattern,
                                 const std::vector<ParameterSpec>& table) {
  const auto found = [&](const std::string& what) {
    return Error(ErrorKind::kConfig,
                 unmatched("lora.targets", printable(pattern), concat(", which matches ", what),
                           "linear layers, as \"q_proj\""));
  };
  for (const ParameterSpec& row : table) {
    const auto layer = linear_layer(row);
    if (!layer || refusal(row).empty() || !matches_end(pattern, *layer)) continue;
    throw found(concat(*layer, ", which ", refusal(row)));
  }
  for (const ParameterSpec& row : table) {
    const auto layer = linear_layer(row);
    if (!layer || !is_of_experts(*layer) || !matches_end(pattern, *layer)) continue;
    throw found(concat(*layer,
                       ", which is of a layer's experts, meant only where they are named: \"",
                       layer->substr(layer->rfind(kOfExperts) + 1), "\""));
  }
  std::set<std::string> all = module_names(table);
  // Includes experts, which are parameters without a module of their own.
  for (const ParameterSpec& row : table) all.insert(row.name);
  for (const std::string& name : all) {
    if (matches_end(pattern, name)) throw found(concat(name, ", which is no linear layer"));
  }
  const auto close = closest_name(pattern, {all.begin(), all.end()});
  throw found(concat("nothing", close ? concat(" (nearest name: ", *close, ")") : std::string()));
}

void check_layer(const ParameterSpec& row, const std::string& layer, const LoraRequest& request) {
  const std::int64_t rows = row.shape[row.shape.size() - 2], columns = row.shape.back();
  const std::int64_t most = std::min(rows, columns);
  TESSERA_CHECK(request.rank <= most, ErrorKind::kConfig, "lora.rank: found ", request.rank,
                ", expected at most ", most, ", the smaller dim of ", layer, " [", rows, ", ",
                columns, "]; lower the rank or leave it out of lora.targets");
  TESSERA_CHECK(request.dropout == 0.0 || row.part != ModelPart::kExperts, ErrorKind::kConfig,
                "lora.dropout: found ", request.dropout, " with an adapter in ", layer,
                ", expected 0: of the inputs of experts nothing is dropped, and peft refuses it, "
                "too; set lora.dropout = 0, or leave experts out of lora.targets");
  TESSERA_CHECK(request.dropout == 0.0 || row.part != ModelPart::kVision, ErrorKind::kConfig,
                "lora.dropout: found ", request.dropout, " with an adapter in ", layer,
                ", expected 0: images have no row and position by which it could be drawn; leave "
                "the vision tower out of lora.targets");
}

/// Adapters always compute in float32 (docs/lora.md): a scale beyond its range makes every result
/// infinite or NaN, or the adapter 0.
void check_scale(const LoraSpec& lora) {
  using Scale = std::numeric_limits<float>;
  const double scale = lora.scale();
  TESSERA_CHECK(scale >= Scale::denorm_min() && scale <= Scale::max(), ErrorKind::kConfig,
                "lora.alpha: found ", lora.alpha, " with lora.rank ", lora.rank,
                ", a factor alpha / rank of ", scale, ", expected one from ", Scale::denorm_min(),
                " to ", Scale::max(),
                ", which float32 holds: adapters compute in it; set lora.alpha to a small multiple "
                "of lora.rank, or leave it out");
}

}  // namespace

LoraSpec plan_lora(const ModelSpec& spec, const LoraRequest& request) {
  if (request.rank == 0) return {};
  TESSERA_CHECK(!traits(spec.family).transposed_linears, ErrorKind::kConfig, "lora.rank: found ",
                request.rank, " for ", traits(spec.family).architecture,
                ", expected 0: its matrices stand [in, out], to which adapters are not "
                "supported");
  check_targets(request);
  const std::vector<ParameterSpec> table = describe(spec).parameters;
  LoraSpec lora{.rank = request.rank,
                .alpha = request.alpha.value_or(static_cast<double>(request.rank)),
                .dropout = request.dropout};
  check_scale(lora);
  std::vector<bool> matched(request.targets.size(), false);
  for (const ParameterSpec& row : table) {
    const auto layer = linear_layer(row);
    if (!layer) continue;
    bool wanted = false;
    for (std::size_t i = 0; i < request.targets.size(); ++i) {
      if (!means(request.targets[i], *layer)) continue;
      if (!refusal(row).empty()) refuse_pattern(request.targets[i], table);
      matched[i] = wanted = true;
    }
    if (!wanted) continue;
    check_layer(row, *layer, request);
    lora.layers.push_back(*layer);
  }
  for (std::size_t i = 0; i < matched.size(); ++i) {
    if (!matched[i]) refuse_pattern(request.targets[i], table);
  }
  return lora;
}

std::vector<std::string> adaptable_layers(const ModelSpec& spec) {
  std::vector<std::string> layers;
  if (traits(spec.family).transposed_linears) return layers;
  for (const ParameterSpec& row : describe(spec).parameters) {
    const auto layer = linear_layer(row);
    if (layer && refusal(row).empty()) layers.push_back(*layer);
  }
  return layers;
}

void add_adapters(LanguageModel& model, const LoraSpec& lora) {
  if (!lora) return;
  const auto modules = model.named_modules("", /*include_self=*/false);
  for (const std::string& layer : lora.layers) {
    const bool of_experts = is_of_experts(layer);
    const auto* module = modules.find(of_experts ? layer.substr(0, layer.rfind('.')) : layer);
    if (module == nullptr && !model.is_whole()) continue;  // another stage's
    TESSERA_INVARIANT(module != nullptr, "a model without ", layer);
    const nn::LoraOptions options{lora.rank, lora.scale(), lora.dropout, layer};
    if (of_experts) {
      dynamic_cast<ExpertBank&>(**module).add_adapter(layer.substr(layer.rfind('.') + 1), options);
    } else {
      dynamic_cast<nn::Linear&>(**module).add_adapter(options);
    }
  }
}

bool is_adapter(std::string_view parameter) {
  return parameter.ends_with(kA) || parameter.ends_with(kB);
}

std::string adapted_layer(std::string_view adapter) {
  static_assert(kA.size() == kB.size());
  return std::string(without(adapter, kA));
}

std::string adapted_weight(const std::string& layer) {
  return is_of_experts(layer) ? layer : concat(layer, kWeight);
}

bool is_of_experts(std::string_view layer) {
  const std::size_t dot = layer.rfind('.');
  if (dot == std::string_view::npos) return false;
  const std::string_view around = layer.substr(0, dot + 1);
  return around.ends_with(kOfExperts);
}

std::string adapter_a(const std::string& layer) { return layer + std::string(kA); }
std::string adapter_b(const std::string& layer) { return layer + std::string(kB); }

}  // namespace tessera::models
