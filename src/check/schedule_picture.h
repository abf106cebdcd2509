// The picture of a pipeline's step, taken over into a page.
//
// A drawing of pipeline::to_svg() is parsed: boxes, numbers and the names of colours come into the
// page, and anything else that a text might hold does not. Next: ../pipeline/picture.h, page.h.
#pragma once

#include <string>
#include <string_view>

namespace tessera::check {

/// Markup: the picture with numbers in its boxes where they are few, else boxes alone as wide as
/// the page, and a legend. A sentence where `svg` is none of to_svg(), or has more boxes than a
/// page holds.
std::string schedule_picture(std::string_view svg);

}  // namespace tessera::check
