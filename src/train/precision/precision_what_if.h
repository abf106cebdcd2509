// `tessera gradients --precision-what-if`: which groups of parameters need float32 for the
// gradients of one batch to stay near those of float32 throughout.
//
// The batch runs once a candidate, each time with a new model under the candidate's
// rules; weights keep the values that they are loaded with. Of the gradients in float32 each rank
// keeps an equal part, independent of the candidates' own shards: buckets, and so shards, differ
// with dtypes. Next: precision_groups.h, precision_search.h, precision_report.h.
#pragma once

#include <functional>
#include <string>

#include "tessera/world.h"
#include "train/config/config.h"
#include "train/precision/precision_report.h"

namespace tessera::train {

/// bfloat16 rounds by up to 2^-8 = 0.4 %, and gradients of dense test models are 1 to 4 % off with
/// all of it (docs/config.md): what is above 5 % is lost in sums that cancel or in changed choices
/// of experts. A gradient that is 5 % off has a cosine of 0.999 with the one in float32.
inline constexpr double kDefaultBound = 0.05;

struct WhatIfRequest {
  Config config;  ///< model.path set; of [precision] param_dtype, reduce_dtype and rule are ours
  std::string batch;  ///< as GradientsRequest
  double bound = kDefaultBound;
  bool impose_routing = false;  ///< as GradientsRequest
};

/// Collective; the report is the same on every rank. Errors: as run_gradients; kConfig for
/// [compile] and lora.dropout, kNumeric where float32 gives no finite gradients.
WhatIfReport precision_what_if(const WhatIfRequest& request, World& world,
                               const std::function<void()>& on_first_step = {});

}  // namespace tessera::train
