#pragma once

#include "on_host.h"
