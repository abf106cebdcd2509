// Everything a program that shards its own modules needs. Start with world.h, then shard.h.
#pragma once

#include "tessera/clip.h"
#include "tessera/contract.h"
#include "tessera/dtype.h"
#include "tessera/dtype_watch.h"
#include "tessera/error.h"
#include "tessera/mesh.h"
#include "tessera/model_contract.h"
#include "tessera/optim.h"
#include "tessera/placement.h"
#include "tessera/precision.h"
#include "tessera/recompute.h"
#include "tessera/shard.h"
#include "tessera/trainable.h"
#include "tessera/visit_tensors.h"
#include "tessera/world.h"
