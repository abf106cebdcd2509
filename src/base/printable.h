// Names and values from files, made safe for a message.
//
// What a hostile file calls a tensor may be megabytes long or hold terminal escapes; every message
// that repeats something out of a file passes it through here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// `text` in single quotes: control bytes and broken UTF-8 as \xNN, cut after `max_bytes` with
/// "...".
std::string printable(std::string_view text, std::size_t max_bytes = 120);

/// A path for a message: `printable`, long enough for any that a system takes in practice.
std::string shown(const std::filesystem::path& path);

/// "[2, 3]"; long shapes are cut after eight dims.
std::string shape_text(std::span<const std::int64_t> shape);

}  // namespace tessera
