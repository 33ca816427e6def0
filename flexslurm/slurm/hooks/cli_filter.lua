--[[
flexslurm: cli_filter.lua

Runs in sbatch, salloc and srun, for jobs of flexslurm alone (name or comment begins with flexslurm,
or --flexslurm-service): adds what its jobs need to survive a preemption, and says what is wrong in
words before the controller is asked. Never an error of its own refuses a job. Users can go around
it: the controller's word is job_submit.lua's.

A site that has a cli_filter.lua already keeps it and adds two lines:

    dofile("@HERE@/cli_filter.lua")               -- at the top
    local rc = flexslurm_pre_submit(options) ; if rc ~= slurm.SUCCESS then return rc end
]]

local FLEXSLURM_LIMITS = {
--@LIMITS@
}

local FLEXSLURM_NO_VAL = 4294967294

-- Slurm's ways to say that an option was not given. A choice against it, as no-requeue, is none.
local FLEXSLURM_UNSET = {
   [""] = true, ["(null)"] = true, ["unset"] = true, ["notset"] = true, ["none"] = true,
   ["N/A"] = true, ["0@0"] = true,
}

local function flexslurm_unset(value)
   return value == nil or FLEXSLURM_UNSET[value] == true
end

local function flexslurm_spank(options)
   local spank = options["spank"]
   local ours = spank and spank["flexslurm"]
   return ours and not flexslurm_unset(ours["flexslurm-service"])
end

local function flexslurm_ours(options)
   local name = options["job-name"] or ""
   local comment = options["comment"] or ""
   return name:match("^flexslurm") ~= nil or comment:match("^flexslurm") ~= nil
      or flexslurm_spank(options)
end

local function flexslurm_say(words)
   slurm.log_error("flexslurm: %s", words)
   return slurm.ERROR
end

-- minutes of [D-]H[:M[:S]] or M[:S]; nil for no limit and for what is no time
local function flexslurm_minutes(text)
   local days, rest = text:match("^(%d+)%-(.+)$")
   local parts = {}
   for part in (rest or text):gmatch("[^:]+") do
      parts[#parts + 1] = tonumber(part)
      if parts[#parts] == nil then
         return nil
      end
   end
   if days then
      return tonumber(days) * 1440 + (parts[1] or 0) * 60 + (parts[2] or 0)
   end
   if #parts == 3 then
      return parts[1] * 60 + parts[2]
   end
   return parts[1]
end

local function flexslurm_check(options)
   if not flexslurm_ours(options) then
      return slurm.SUCCESS
   end
   local gres = "," .. (options["gres"] or "")
   local wrong = gres:match(",gpu/([^,]+)") or gres:match(",gres[:/]gpu/([^,]+)")
   if wrong then
      return flexslurm_say("--gres=gpu/" .. wrong .. " is not how Slurm writes it: use --gres=gpu:"
         .. wrong)
   end
   local limits = FLEXSLURM_LIMITS[options["partition"] or ""]
   if limits then
      local minutes = flexslurm_minutes(options["time"] or "")
      -- an unset --time reads as millions of days
      if limits.max_minutes and minutes and minutes < FLEXSLURM_NO_VAL
         and minutes > limits.max_minutes then
         return flexslurm_say(string.format(
            "partition '%s' allows %d minutes, --time asks for %d", options["partition"],
            limits.max_minutes, minutes))
      end
   end
   if options["type"] ~= "sbatch" then
      return slurm.SUCCESS
   end
   if flexslurm_unset(options["signal"]) then
      options["signal"] = "USR1@120"
   end
   if flexslurm_unset(options["open-mode"]) then
      options["open-mode"] = "append"
   end
   if (not limits or limits.requeue) and flexslurm_unset(options["requeue"]) then
      options["requeue"] = "1"
   end
   return slurm.SUCCESS
end

function flexslurm_pre_submit(options)
   local fine, code = pcall(flexslurm_check, options)
   if fine then
      return code
   end
   slurm.log_debug("flexslurm: cli_filter.lua: %s", tostring(code))
   return slurm.SUCCESS
end

if slurm_cli_pre_submit == nil then
   function slurm_cli_setup_defaults(options, early_pass)
      return slurm.SUCCESS
   end

   function slurm_cli_pre_submit(options, pack_offset)
      return flexslurm_pre_submit(options)
   end

   function slurm_cli_post_submit(offset, job_id, step_id)
      return slurm.SUCCESS
   end
end

return slurm.SUCCESS
