#include "io/tensor_source.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {

std::int64_t SourceTensor::numel() const {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) product *= size;
  return product;
}

const SourceTensor* TensorSource::find(std::string_view name) const {
  const auto found = tensors().find(name);
  return found == tensors().end() ? nullptr : &found->second;
}

std::optional<DType> TensorSource::bulk_dtype() const {
  std::map<DType, std::int64_t> elements;
  for (const auto& [name, tensor] : tensors()) {
    if (!tensor.unpacked) elements[tensor.original] += tensor.numel();
  }
  return tessera::bulk_dtype(elements);
}

std::optional<DType> bulk_dtype(const std::map<DType, std::int64_t>& elements) {
  std::optional<DType> bulk;
  for (const auto& [dtype, count] : elements) {
    if (!is_floating(dtype)) continue;
    const bool narrower = bulk && size_of(dtype) < size_of(*bulk);
    if (!bulk || count > elements.at(*bulk) || (count == elements.at(*bulk) && narrower)) {
      bulk = dtype;
    }
  }
  return bulk;
}

namespace {

/// The limit of memory in addition to what is read.
constexpr std::int64_t kMostBytes = std::int64_t{4} << 20;
/// Rows that begin further apart are read one by one: the bytes between them would cost more than a
/// call does.
constexpr std::int64_t kFarBytes = std::int64_t{256} << 10;

using Read = std::function<void(std::int64_t, std::int64_t, std::span<std::byte>)>;

bool is_box_inside(const TensorBox& box, std::span<const std::int64_t> shape) {
  if (box.offset.size() != shape.size() || box.size.size() != shape.size()) return false;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (box.offset[d] < 0 || box.size[d] < 1 || box.offset[d] > shape[d] - box.size[d]) {
      return false;
    }
  }
  return true;
}

class BoxReader {
 public:
  BoxReader(const RangeOfBox& wanted, std::span<std::byte> out, const Read& read)
      : wanted_(wanted), out_(out), read_(read), row_(row_length(wanted.box, wanted.shape)) {}

  void run() {
    for (std::int64_t at = wanted_.elements.begin; at < wanted_.elements.end;) {
      const std::int64_t last = end_of_span(at);
      const std::int64_t count = last - at;
      if (count <= left_in_row(at)) {
        read_(position(at), position(at) + count, place(at, count));
      } else {
        read_rows(at, last);
      }
      at = last;
    }
  }

 private:
  std::size_t bytes(std::int64_t elements) const {
    return static_cast<std::size_t>(elements * wanted_.element_bytes);
  }
  std::span<std::byte> place(std::int64_t index, std::int64_t count) const {
    return out_.subspan(bytes(index - wanted_.elements.begin), bytes(count));
  }
  std::int64_t position(std::int64_t index) const {
    return position_in_tensor(wanted_.box, wanted_.shape, index);
  }
  std::int64_t left_in_row(std::int64_t index) const { return row_ - index % row_; }

  /// Returns the end of the elements that one call reads: rows, as long as they are close together.
  std::int64_t end_of_span(std::int64_t at) const {
    const std::int64_t first = position(at);
    std::int64_t last = std::min(wanted_.elements.end, at + left_in_row(at));
    for (std::int64_t before = first; last < wanted_.elements.end;) {
      const std::int64_t next = std::min(wanted_.elements.end, last + row_);
      const std::int64_t from = position(last);
      if ((from - before) * wanted_.element_bytes > kFarBytes ||
          (from + next - last - first) * wanted_.element_bytes > kMostBytes) {
        break;
      }
      before = from;
      last = next;
    }
    return last;
  }

  void read_rows(std::int64_t at, std::int64_t last) {
    const std::int64_t first = position(at);
    const std::int64_t beyond = position(last - 1) + 1;
    buffer_.resize(bytes(beyond - first));
    read_(first, beyond, buffer_);
    for_each_row(wanted_.box, wanted_.shape, at, last, [&](const BoxRow& row) {
      std::memcpy(place(row.index, row.count).data(), buffer_.data() + bytes(row.position - first),
                  bytes(row.count));
    });
  }

  const RangeOfBox& wanted_;
  std::span<std::byte> out_;
  const Read& read_;
  std::int64_t row_;  // elements that are consecutive in the tensor, too
  std::vector<std::byte> buffer_;
};

}  // namespace

void read_box(const RangeOfBox& wanted, std::span<std::byte> out, const Read& read) {
  const auto [begin, end] = wanted.elements;
  if (begin == end) return;
  TESSERA_INVARIANT(is_box_inside(wanted.box, wanted.shape) && 0 <= begin && begin < end &&
                        end <= wanted.box.numel(),
                    "a box outside of its tensor");
  BoxReader(wanted, out, read).run();
}

void read_box(const TensorSource& source, std::string_view name, const TensorBox& box,
              std::int64_t begin, std::int64_t end, std::span<std::byte> out) {
  const SourceTensor* const tensor = source.find(name);
  TESSERA_CHECK(tensor != nullptr, ErrorKind::kFormat, source.path().string(), ": found no tensor ",
                printable(name));
  read_box({tensor->shape, size_of(tensor->dtype), box, {begin, end}}, out,
           [&](std::int64_t first, std::int64_t last, std::span<std::byte> to) {
             source.read(name, first, last, to);
           });
}

}  // namespace tessera
