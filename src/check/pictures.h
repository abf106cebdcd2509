// Bars of a report: what ranks hold, the bytes that they send by axis, a step's time by part.
//
// Each is a figure of SVG in percent of the page's width, so that its text keeps its size on a
// phone and in print, and its colours are those of the page's style (page.cpp). Tables with the
// exact numbers stand behind it. Pure. Next: step_memory.h, markup.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "check/report.h"

namespace tessera::check {

/// The part of Place.held that depends on the batch.
inline constexpr std::string_view kActivations = "activations";
/// Bytes that a rank holds for every batch.
std::int64_t always_held(const Place& place);

/// The places of the pipeline that a page shows: all, or, of more than eight, the first one, the
/// last one and the one that needs most.
struct ShownPlaces {
  std::vector<const Place*> places = {};
  std::size_t of = 0;  ///< how many there are
};
ShownPlaces shown_places(const Report& report);
/// A sentence where a page leaves places out; else empty.
std::string which_places(const ShownPlaces& shown);
/// "pp 3, rank 96"; "rank 0" where there is no pipeline.
std::string place_name(const Report& report, const Place& place);

/// Draws what a rank holds by part, next to the memory that it has, on one scale for all places.
std::string held_picture(const Report& report);
/// Draws what a rank sends, a bar a place, by axis and kind.
std::string sent_picture(const Report& report);
/// Needs report.time.
std::string time_picture(const Report& report);

}  // namespace tessera::check
