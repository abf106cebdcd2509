#include "nn/token_mixer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "tessera/error.h"

namespace tessera::nn {

void KvCache::advance(std::int64_t added) {
  TESSERA_CHECK(added <= capacity_ - length_, ErrorKind::kUsage, "key-value cache: found ", added,
                " new positions after ", length_, ", expected at most ", capacity_, " in all");
  length_ += added;
}

void KvCache::append(const at::Tensor& keys, const at::Tensor& values) {
  const std::int64_t rows = keys.size(0), groups = keys.size(1), added = keys.size(2),
                     head_dim = keys.size(4), before = length_;
  if (!keys_.defined()) {
    keys_ = at::empty({rows, groups, capacity_, head_dim}, keys.options());
    if (values.defined()) values_ = at::empty_like(keys_);
  }
  TESSERA_CHECK(keys_.size(0) == rows && keys_.size(1) == groups && keys_.size(3) == head_dim &&
                    keys_.scalar_type() == keys.scalar_type(),
                ErrorKind::kUsage, "key-value cache: found keys ", keys.sizes(), " ",
                keys.scalar_type(), ", expected rows, heads and dtype of ", keys_.sizes(), " ",
                keys_.scalar_type());
  advance(added);
  keys_.narrow(2, before, added).copy_(keys.squeeze(3));
  if (values.defined()) {
    values_.narrow(2, before, added)
        .copy_(values.view({rows, added, groups, head_dim}).transpose(1, 2));
  }
}

}  // namespace tessera::nn
