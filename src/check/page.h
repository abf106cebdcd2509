// The page of a check: a report as one HTML file, to look at and to show around.
//
// It loads nothing, runs nothing and is the same for the same report: pictures are SVG in it, its
// style stands at its head. It is read on white and on dark, on a phone, in print, and by a screen
// reader. Pure. Next: report.h, pictures.h.
#pragma once

#include <string>

#include "check/report.h"

namespace tessera::check {

/// At most some 500 KB for any report: long texts are cut, and the page says what it leaves out.
std::string page_of(const Report& report);

}  // namespace tessera::check
