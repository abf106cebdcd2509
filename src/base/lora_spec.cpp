#include "base/lora_spec.h"

#include "tessera/error.h"

namespace tessera {

void check_targets(const LoraRequest& request) {
  TESSERA_CHECK(request.rank == 0 || !request.targets.empty(), ErrorKind::kConfig,
                "lora.targets: found nothing, expected the linear layers that get an adapter, as "
                "[\"q_proj\", \"v_proj\"]");
}

}  // namespace tessera
