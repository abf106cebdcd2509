// `tessera gradients`: loss, logits and the full gradient of every parameter of one batch, under
// any layout.
#pragma once

#include <functional>
#include <string>

#include "tessera/world.h"
#include "train/config/config.h"

namespace tessera::train {

struct GradientsRequest {
  Config config;      ///< model.path set; training, parallelism, precision count
  std::string batch;  ///< .safetensors with input_ids and labels [B, T]
  std::string out;    ///< .safetensors to write
  bool logits = true;
  bool impose_routing = false;  ///< mixtures of experts; without effect on dense models
};

/// Collective; rank 0 writes `out`. Errors: as run_training.
void run_gradients(const GradientsRequest& request, World& world,
                   const std::function<void()>& on_first_step = {});

}  // namespace tessera::train
