// How the files of a model hold its parameters: one tensor of a parameter's name, or several that
// it stacks (experts).
//
// Pure. Everything that is read from or written to files goes by these names; rules, contracts and
// messages by the parameter's own. Next: layout/local_part.h says which elements a rank holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "layout/local_part.h"
#include "models/description.h"
#include "tessera/contract.h"

namespace tessera::train {

/// The tensors that hold a parameter, one after the other its elements.
struct FileForm {
  std::vector<std::string> names;  ///< file.count of them
  layout::FileShape file;
};

FileForm file_form(const models::ParameterSpec& parameter);

class FileForms {
 public:
  /// Each parameter one tensor of its own name and shape.
  FileForms() = default;
  explicit FileForms(const std::vector<models::ParameterSpec>& table);

  /// Of a parameter of the table; one that is not there is one tensor (an adapter).
  FileForm of(const GradContract& contract) const;

 private:
  std::map<std::string, FileForm, std::less<>> stacked_;
};

/// Where the elements [range) of a rank's flattened part lie in the file: layout::pieces, and the
/// short way where the part is the whole.
std::vector<layout::Piece> pieces_in_file(const ParameterLayout& layout,
                                          const std::vector<std::int64_t>& shape,
                                          const layout::FileShape& file,
                                          const std::vector<int>& coordinates, layout::Range range);

/// The elements [begin, end) of a piece, counted from its first.
layout::Piece part_of(const layout::Piece& piece, std::int64_t begin, std::int64_t end);

}  // namespace tessera::train
