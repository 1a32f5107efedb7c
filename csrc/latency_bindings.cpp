// Arithmetic of the policy predicted_latency, which every request to a balancer needs: times learnt
// online, and costs by them. What the terms mean is told by predicted_latency.py.

#include "latency_bindings.h"

#include <algorithm>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr double kMemory = 0.99;  // of a sample's weight, with each later one
constexpr double kDelayed = 4.0;  // requests delayed by one more, for each that waits, up to all
constexpr double kEqualMs = 1.0;  // difference of two costs that is too small to choose by

double number(nb::handle value) {
  const double found =
      PyLong_Check(value.ptr()) ? PyLong_AsDouble(value.ptr()) : PyFloat_AsDouble(value.ptr());
  if (found == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return found;
}

class Line {
 public:
  Line(double slope, double unit)
      : slope_(slope), assumed_(unit * unit * slope), prior_(unit * unit) {}

  double slope() const { return slope_; }
  double base() const { return base_; }
  double at(nb::handle x) const { return base_ + slope_ * number(x); }

  void learn(nb::handle x_given, nb::handle y_given) {
    const double x = number(x_given);
    const double y = number(y_given);
    count_ = kMemory * count_ + 1;
    x_ = kMemory * x_ + x;
    y_ = kMemory * y_ + y;
    xx_ = kMemory * xx_ + x * x;
    xy_ = kMemory * xy_ + x * y;
    const double mean_x = x_ / count_;
    const double mean_y = y_ / count_;
    slope_ = std::max(0.0, (xy_ - x_ * mean_y + assumed_) / (xx_ - x_ * mean_x + prior_));
    base_ = mean_y - slope_ * mean_x;
    if (base_ >= 0) return;
    base_ = 0;
    slope_ = (xy_ + assumed_) / (xx_ + prior_);
  }

 private:
  double slope_;
  double base_ = 0;
  double assumed_;
  double prior_;
  double count_ = 0, x_ = 0, y_ = 0, xx_ = 0, xy_ = 0;
};

// Names of a view's fields, made once: for the life of the process.
const nb::str& name_of(const char* field) {
  return *new nb::str(nb::steal<nb::str>(PyUnicode_InternFromString(field)));
}

double field(nb::handle view, const nb::str& name) { return number(nb::getattr(view, name)); }

double known(const nb::dict& values, nb::handle name, double otherwise) {
  PyObject* const found = PyDict_GetItemWithError(values.ptr(), name.ptr());
  if (found != nullptr) return number(found);
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return otherwise;
}

nb::tuple request_costs(const nb::sequence& views, const nb::dict& hits, const nb::dict& paces,
                        const nb::dict& peers, double least_missed, double fetch, double future,
                        double crowd, double prefill, double others, double places,
                        double answer_ms) {
  static const nb::str &id = name_of("id"), &outstanding = name_of("outstanding"),
                       &uncached = name_of("uncached_tokens"), &reported = name_of("running"),
                       &pending = name_of("pending"), &round_trip = name_of("round_trip_ms");
  if (nb::len(views) == 0) throw nb::value_error("views is empty");
  // Requests that come to a replica while it computes a token.
  double arrivals = 0;
  for (const nb::handle view : views) arrivals += field(view, outstanding);
  arrivals =
      arrivals / static_cast<double>(nb::len(views)) * (answer_ms != 0 ? prefill / answer_ms : 0);
  nb::dict costs;
  nb::list full;
  std::vector<double> each;
  for (const nb::handle view : views) {
    const nb::object name = nb::getattr(view, id);
    double count, ahead;
    if (peers.size() != 0 && peers.contains(name)) {
      const nb::object load = peers[name];
      count = number(load[0]);
      ahead = number(load[1]);
    } else {
      count = field(view, outstanding);
      ahead = field(view, uncached);
      places = std::max(places, field(view, reported));
    }
    double running = count;
    double waiting_ms = 0;
    if (count > places && field(view, pending) != 0) {
      full.append(name);
      running = places;
      const double waiting = count - running;
      waiting_ms = answer_ms / running * (waiting + others * std::min(count, kDelayed * waiting));
    }
    const double missed = least_missed - fetch * known(hits, name, 0);
    const double held_up = 1 + others * (count + arrivals * (missed + ahead));
    const double prefill_ms = known(paces, name, 1) * prefill * (missed * held_up + ahead);
    each.push_back(future * field(view, round_trip) + crowd * running + prefill_ms + waiting_ms);
    costs[name] = each.back();
  }
  const double limit = *std::min_element(each.begin(), each.end()) + kEqualMs;
  nb::list cheapest;
  std::size_t place = 0;
  for (const nb::handle view : views)
    if (each[place++] <= limit) cheapest.append(view);
  return nb::make_tuple(costs, cheapest, places, full);
}

}  // namespace

void bind_latency(nb::module_& module) {
  nb::class_<Line>(module, "Line", "See banaserve/_native.pyi.")
      .def(nb::init<double, double>(), "slope"_a, "unit"_a)
      .def("__call__", &Line::at, "x"_a)
      .def("learn", &Line::learn, "x"_a, "y"_a)
      .def_prop_ro("base", &Line::base)
      .def_prop_ro("slope", &Line::slope);
  module.def("request_costs", &request_costs, "views"_a, "hits"_a, "paces"_a, "peers"_a,
             "least_missed"_a, "fetch"_a, "future"_a, "crowd"_a, "prefill"_a, "others"_a,
             "places"_a, "answer_ms"_a, "See banaserve/_native.pyi.");
}
