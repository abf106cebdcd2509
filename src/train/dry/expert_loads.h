// How often tokens choose each expert in a dry step, which has no scores: evenly, or by given
// shares.
//
// Pure. The tokens that a router sees are dealt out: every expert gets its share of their choices,
// rounded to whole tokens by largest remainders, and every token gets as many different experts as
// the model says. Any range of the tokens has nearly the same shares. Next: dry_step.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/model_spec.h"
#include "tessera/mesh_shape.h"

namespace tessera::train {

struct ExpertLoads {
  /// Shares of the experts in any unit: one list for all layers, or one a layer with experts, in
  /// their order. None: every expert is chosen equally often.
  std::vector<std::vector<double>> layers = {};

  bool are_even() const { return layers.empty(); }
  bool operator==(const ExpertLoads&) const = default;
};

/// Errors: kFormat for lists of another number or length than the model has layers and experts, for
/// shares that are below 0 or not finite, for a list of zeros alone; kConfig for a model without
/// experts.
void require_fit(const ExpertLoads& loads, const models::RoutedExperts& of, std::string_view where);

/// From JSON: a list of numbers, or a list of such lists. `where` names the file. Errors: kFormat
/// for anything else, and as require_fit().
ExpertLoads parse_expert_loads(std::string_view text, std::string_view where,
                               const models::RoutedExperts& of);

/// Those of --expert-loads FILE, even ones without a file. Errors, which name the option and the
/// file: kIo where it cannot be read, else as parse_expert_loads().
ExpertLoads read_expert_loads(const std::optional<std::string>& file,
                              const models::ModelSpec& spec);

/// How many of `tokens` tokens choose each expert; the sum is tokens x experts_per_token. A token
/// meets an expert once, so that one with a share above 1 / experts_per_token is chosen by every
/// token, and the others take what it leaves by their shares (evenly where those are all 0). Of
/// equal remainders the lower expert's is rounded up.
std::vector<std::int64_t> tokens_of_experts(std::span<const double> shares, std::int64_t tokens,
                                            std::int64_t experts_per_token);

/// Writes [tokens, experts_per_token] numbers of experts, each as often as tokens_of_experts()
/// says.
void deal_experts(std::span<const double> shares, std::int64_t experts_per_token,
                  std::span<std::int64_t> chosen);

/// The rank with the busiest experts, over all layers, among those that share a layer's experts
/// with `rank`; `rank` itself where none is busier.
int busiest_rank(const ExpertLoads& loads, const MeshShapes& mesh, int rank);

}  // namespace tessera::train
