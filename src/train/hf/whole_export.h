// The folder of a model of more than text that a text model was taken from (Multimodal,
// ../../models/family.h), with the text model's tensors in the place of its own: what the text
// model left out, as a vision tower, and config.json are that folder's. Next: hf_export.h.
#pragma once

#include "train/hf/hf_export.h"

namespace tessera::train {

/// `plan` as plan_export gives it, for `source`, which must outlive the result. Without
/// ExportOptions::dtype the tensors that are added have that folder's. Errors: kUsage where
/// training did not begin with such a folder; kFormat where that has no tensor for one of the text
/// model's; kIo.
ExportPlan with_the_rest(ExportPlan plan, const ModelSource& source, const ExportOptions& options);

}  // namespace tessera::train
