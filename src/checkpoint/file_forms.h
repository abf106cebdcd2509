// FileForms: how the files of a model hold its parameters: one tensor of a parameter's name, or
// several that it stacks (experts).
//
// Pure. Everything that is read from or written to files uses these names; rules, contracts and
// messages use the parameter's own. Which parameters of a model are stacked:
// train/hf/model_forms.h. Next: layout/local_part.h says which elements a rank holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "layout/local_part.h"
#include "tessera/contract.h"

namespace tessera::checkpointing {

/// The tensors that together hold a parameter, in the order of its elements.
struct FileForm {
  std::vector<std::string> names;  ///< file.count of them
  layout::FileShape file;
};

class FileForms {
 public:
  /// Makes each parameter one tensor of its own name and shape.
  FileForms() = default;
  explicit FileForms(std::map<std::string, FileForm, std::less<>> stacked)
      : stacked_(std::move(stacked)) {}

  /// Returns the form of a stacked parameter; any other parameter is one tensor of its name.
  FileForm of(const GradContract& contract) const { return of(contract, contract.name); }
  /// The same for another name of the parameter, under which the files have it.
  FileForm of(const GradContract& contract, const std::string& name) const;
  /// Returns the names of the tensors only.
  std::vector<std::string> names_of(const std::string& parameter) const;

 private:
  std::map<std::string, FileForm, std::less<>> stacked_;
};

/// Returns where the elements [range) of a rank's flattened part are in the file: layout::pieces,
/// or a shorter way where the part is the whole.
std::vector<layout::Piece> pieces_in_file(const ParameterLayout& layout,
                                          const std::vector<std::int64_t>& shape,
                                          const layout::FileShape& file,
                                          const std::vector<int>& coordinates, layout::Range range);

/// Returns the elements [begin, end) of a piece, counted from its first.
layout::Piece part_of(const layout::Piece& piece, std::int64_t begin, std::int64_t end);

}  // namespace tessera::checkpointing
