// What cuda/views.h says of a block's memory, for test_views_launch.py: of each view on standard
// input, the bytes of its tables, of room for a view and another one, and of its box.
#include <iostream>

#include "views.h"

using namespace fastaug;

int main() {
  View view = {};
  Form form = {};
  Layer layer = {};
  int strip_rows;
  while (std::cin >> form.size >> form.layers >> form.border >> form.filter.cubic >>
         form.filter.antialias >> layer.operation >> strip_rows >> view.height >> view.width >> view.top >> view.left >>
         view.box_height >> view.box_width) {
    const Side x(view.box_width, form.size, form.filter), y(view.box_height, form.size, form.filter);
    const Room room(view, &layer, form);
    std::cout << 4LL * Layout(form.size, 1, x, y, strip_rows).size << ' ' << room.first << ' '
              << room.second << ' ' << room.box << '\n';
  }
}
