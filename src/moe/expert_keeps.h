// What autograd holds of routers and experts until their backward: nn/layer_keeps.h for the layers of
// this floor. Symbols: E experts, K experts a token. Pure. Next: models/keeps/kept_activations.h.
#pragma once

#include <cstdint>
#include <string>

#include "nn/layer_keeps.h"

namespace tessera::moe {

/// Tokens that a layer's experts get, and what the router says of them.
struct KeptRouting {
  std::int64_t tokens = 0;
  nn::KeptValue indices, weights;  ///< [tokens, K]
};

struct ExpertKeepsCase {
  std::int64_t num_experts = 0;        ///< E
  std::int64_t experts_per_token = 0;  ///< K
  std::int64_t intermediate_size = 0;
  std::int64_t ep = 1;
  std::int64_t etp = 1;
  bool softmax_of_all = false;  ///< scores are probabilities before the choice, not after it
  bool norm_topk = false;
  bool scaled = false;  ///< by a factor that is not 1
  bool geglu = false;   ///< else as SwiGLU
  bool score_before_experts = false;
  /// The routers' probabilities are asked for, as the auxiliary loss does.
  bool router_probabilities = false;
};

class ExpertKeeps {
 public:
  ExpertKeeps(nn::LayerKeeps& layers, const ExpertKeepsCase& of) : layers_(layers), of_(of) {}

  /// routing.cpp, of scores [tokens, E].
  KeptRouting route(const nn::KeptValue& scores, DType weights_dtype);
  /// experts.cpp. `x` are the tokens that are sent.
  nn::KeptValue experts(const nn::KeptValue& x, const KeptRouting& routed, const std::string& name);

 private:
  /// nn/grouped_linear.cpp, and expert_adapter.cpp where there is one.
  nn::KeptValue grouped(const nn::KeptValue& x, std::int64_t rows, std::int64_t out,
                        const std::string& name);
  /// What two halves of one product become.
  nn::KeptValue gate(const nn::KeptValue& both);

  nn::LayerKeeps& layers_;
  const ExpertKeepsCase of_;
};

}  // namespace tessera::moe
