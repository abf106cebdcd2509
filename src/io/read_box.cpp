#include "io/read_box.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// Held beside what is read.
constexpr std::int64_t kMostBytes = std::int64_t{4} << 20;
/// Rows that begin further from each other are read one by one: what lies between them would cost
/// more than a call does.
constexpr std::int64_t kFarBytes = std::int64_t{256} << 10;

bool is_inside(const TensorBox& box, const std::vector<std::int64_t>& shape) {
  if (box.offset.size() != shape.size() || box.size.size() != shape.size()) return false;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (box.offset[d] < 0 || box.size[d] < 1 || box.offset[d] > shape[d] - box.size[d]) {
      return false;
    }
  }
  return true;
}

class BoxRead {
 public:
  BoxRead(const TensorSource& source, std::string_view name, const SourceTensor& tensor,
          const TensorBox& box)
      : source_(source),
        name_(name),
        tensor_(tensor),
        box_(box),
        element_bytes_(size_of(tensor.dtype)),
        row_(row_length(box, tensor.shape)) {}

  void read(std::int64_t begin, std::int64_t end, std::span<std::byte> out) {
    for (std::int64_t at = begin; at < end;) {
      const std::int64_t last = end_of_span(at, end);
      const auto part = out.subspan(bytes(at - begin), bytes(last - at));
      last - at <= left_in_row(at)
          ? source_.read(name_, position(at), position(at) + last - at, part)
          : read_rows(at, last, part);
      at = last;
    }
  }

 private:
  std::size_t bytes(std::int64_t elements) const {
    return static_cast<std::size_t>(elements * element_bytes_);
  }
  std::int64_t position(std::int64_t index) const {
    return position_in_tensor(box_, tensor_.shape, index);
  }
  std::int64_t left_in_row(std::int64_t index) const { return row_ - index % row_; }

  /// Up to where elements are read in one call: rows, as long as they lie close together.
  std::int64_t end_of_span(std::int64_t at, std::int64_t end) const {
    const std::int64_t first = position(at);
    std::int64_t last = std::min(end, at + left_in_row(at));
    std::int64_t before = first;
    while (last < end) {
      const std::int64_t next = std::min(end, last + row_);
      const std::int64_t from = position(last);
      if ((from - before) * element_bytes_ > kFarBytes ||
          (from + next - last - first) * element_bytes_ > kMostBytes) {
        break;
      }
      before = from;
      last = next;
    }
    return last;
  }

  void read_rows(std::int64_t at, std::int64_t last, std::span<std::byte> out) {
    const std::int64_t first = position(at);
    const std::int64_t beyond = position(last - 1) + 1;
    buffer_.resize(bytes(beyond - first));
    source_.read(name_, first, beyond, buffer_);
    for (std::int64_t done = at; done < last;) {
      const std::int64_t count = std::min(left_in_row(done), last - done);
      std::memcpy(out.data() + bytes(done - at), buffer_.data() + bytes(position(done) - first),
                  bytes(count));
      done += count;
    }
  }

  const TensorSource& source_;
  std::string_view name_;
  const SourceTensor& tensor_;
  const TensorBox& box_;
  std::int64_t element_bytes_;
  std::int64_t row_;  // elements that follow one another in the tensor too
  std::vector<std::byte> buffer_;
};

}  // namespace

void read_box(const TensorSource& source, std::string_view name, const TensorBox& box,
              std::int64_t begin, std::int64_t end, std::span<std::byte> out) {
  const SourceTensor* const tensor = source.find(name);
  TESSERA_CHECK(tensor != nullptr, ErrorKind::kFormat, source.path().string(), ": found no tensor ",
                printable(name));
  TESSERA_INVARIANT(begin == end || is_inside(box, tensor->shape), "a box outside of ", name);
  BoxRead(source, name, *tensor, box).read(begin, end, out);
}

}  // namespace tessera
