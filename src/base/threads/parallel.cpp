#include "base/threads/parallel.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "base/environment.h"
#include "base/threads/cores.h"
#include "base/threads/shapes_only.h"

namespace tessera::base {
namespace {

/// Reads the limit as libgomp does: other texts than numbers are ignored.
std::optional<int> thread_limit() {
  const auto text = environment_variable("OMP_THREAD_LIMIT");
  if (!text) return std::nullopt;
  const auto digits = std::min(text->find_first_not_of(" \t\n\v\f\r+"), text->size());
  int limit = 0;
  const auto [end, error] =
      std::from_chars(text->data() + digits, text->data() + text->size(), limit);
  return error == std::errc() && limit > 0 ? std::optional(limit) : std::nullopt;
}

}  // namespace

void set_threads(int wanted) {
  at::set_num_threads(std::min(wanted, thread_limit().value_or(wanted)));
}

void heed_thread_limit() {
  if (thread_limit()) set_threads(at::get_num_threads());
}

void heed_cpu_quota() {
  if (gives_threads(environment_variable("OMP_NUM_THREADS").value_or(""))) return;
  const int cores = usable_cores();
  if (cores < at::get_num_threads()) set_threads(cores);
}

void for_ranges(std::int64_t size, std::int64_t grain,
                c10::function_ref<void(std::int64_t, std::int64_t)> body,
                std::int64_t most_on_one) {
  if (size <= 0 || shapes_only()) return;
  RECORD_USER_SCOPE("tessera::kernel");
  if (size <= std::max(grain, most_on_one) || at::get_num_threads() == 1 ||
      at::in_parallel_region()) {
    body(0, size);
    return;
  }
  // The tensor has one byte for each part: the address that the iterator passes identifies the
  // part.
  const std::int64_t parts = (size + grain - 1) / grain;
  at::Tensor bytes = at::empty({parts}, at::kByte);
  const char* first = static_cast<const char*>(bytes.const_data_ptr());
  auto iterator = at::TensorIteratorConfig()
                      .set_check_mem_overlap(false)
                      .check_all_same_dtype(false)
                      .declare_static_dtype_and_device(at::kByte, at::kCPU)
                      .resize_outputs(false)
                      .add_output(bytes)
                      .build();
  const auto run_parts = [&](char** data, const std::int64_t* strides, std::int64_t inner,
                             std::int64_t outer) {
    for (std::int64_t i = 0; i < outer; ++i) {
      const std::int64_t part = data[0] + i * strides[1] - first;
      body(part * grain, std::min(size, (part + inner) * grain));
    }
  };
  iterator.for_each(at::TensorIteratorBase::loop2d_t(run_parts), /*grain_size=*/1);
}

}  // namespace tessera::base
