// What comes from memory while something else is computed.
#pragma once

#include "pair_tiles.h"

namespace {

// Tiles of rows that are fetched into the second cache, evenly over a number of products and in the order in which they
// lie, so that the machine sees what comes next. Without tiles nothing is fetched.
class RowsAhead {
 public:
  static constexpr std::int64_t MOST = 48;  // tiles: of 256 keys in two parts, and of their values

  void add(const RowTile& rows, std::int64_t width) {
    tiles_[count_] = rows, lines_of_[count_++] = (width + 31) / 32;
    lines_ += BLOCK * ((width + 31) / 32);
  }
  // All products that fetch() is told of: of a row of 32 elements with 16 columns.
  void spread_over(std::int64_t products) { products_ = products; }

  void fetch(std::int64_t products) {
    if (tile_ == count_) return;
    for (owed_ += products * lines_; owed_ >= products_; owed_ -= products_) {
      __builtin_prefetch(tiles_[tile_].data + row_ * tiles_[tile_].stride + line_ * 32, 0, 2);
      if (++line_ < lines_of_[tile_]) continue;
      line_ = 0;
      if (++row_ < BLOCK) continue;
      row_ = 0;
      if (++tile_ == count_) return;
    }
  }

 private:
  RowTile tiles_[MOST];
  std::int64_t lines_of_[MOST];  // cache lines of a row
  std::int64_t count_ = 0, lines_ = 0, products_ = 1, owed_ = 0;
  std::int64_t tile_ = 0, row_ = 0, line_ = 0;  // that comes next
};

}  // namespace
